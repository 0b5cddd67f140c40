"""Where and how a worker's arena can be written to."""

import enum

import msgspec


class TransportKind(enum.StrEnum):
    """In order of preference, best last."""

    TCP = "tcp"
    SHARED_MEMORY = "shared_memory"
    IN_PROCESS = "in_process"


class TransportChoice(enum.StrEnum):
    """What a worker offers."""

    AUTO = "auto"  # shared memory to workers under the same supervisor, tcp to all others
    TCP = "tcp"  # tcp alone


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """One way to write to a worker's arena."""

    kind: TransportKind
    address: str  # "host:port" for tcp, "domain/name" for shared_memory, a name for in_process

    @property
    def domain(self) -> str:
        """Within which processes this way exists at all; "" for everywhere."""
        return self.address.rpartition("/")[0] if self.kind is TransportKind.SHARED_MEMORY else ""

    def is_same_way(self, other: "Endpoint") -> bool:
        """Whether whoever offers the other can use this one."""
        return (self.kind, self.domain) == (other.kind, other.domain)
