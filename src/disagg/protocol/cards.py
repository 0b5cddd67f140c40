"""What a worker shows of itself: who it is, what it serves, how its KV lies, which messages it speaks."""

from typing import NamedTuple

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.formats import KvWire
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


class ProtocolRange(NamedTuple):
    """Versions of the messages that a program speaks: the lowest and the highest."""

    lowest: int
    highest: int

    def meets(self, other: "ProtocolRange") -> bool:
        """Whether some version is in both."""
        return self.lowest <= other.highest and other.lowest <= self.highest

    def __str__(self) -> str:
        return f"{self.lowest}..{self.highest}"


class PoolCard(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal between two workers that serve one model."""

    model: str  # the name clients use
    model_digest: str  # over the weights, not only the geometry
    tokenizer_digest: str
    numerics: Numerics
    vocab_size: int
    max_context: int  # tokens
    arithmetic: str = ""  # weights and kernels: what must be equal for answers to be equal

    @property
    def revision(self) -> tuple[str, str]:
        """What one answer keeps to, whoever writes it."""
        return (self.model_digest, self.numerics.value)


class WorkerCard(msgspec.Struct, frozen=True, array_like=True):
    """Everything others need to know of a worker; fixed for one incarnation."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    pool: PoolCard
    layout: KvLayout
    num_blocks: int
    control_address: str  # "host:port" where peers connect
    data_endpoints: tuple[Endpoint, ...]  # of each rank, one or more
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    kv_wire: KvWire = KvWire.NATIVE  # how KV travels to and from this worker

    @property
    def protocols(self) -> ProtocolRange:
        return ProtocolRange(self.protocol_min, self.protocol_max)
