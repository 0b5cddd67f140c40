"""What a router's dispatcher is told at its start."""

import msgspec

from disagg.core.ids import Incarnation
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.cards import PROTOCOL_MAX, PROTOCOL_MIN, ProtocolRange

RETRY_AFTER_S = 1.0  # what a client is told when nobody can serve it now


class DispatcherConfig(msgspec.Struct, frozen=True):
    """What a router is told at its start."""

    incarnation: Incarnation
    tokenizer_digests: dict[str, str]  # by model name
    local_prefill_tokens: int = 512  # longest prompt that a decode worker reads itself; 0: never
    max_open_requests: int = 1024
    max_claimed_share: float = 8.0  # promised KV over KV that exists; more is turned away
    recovery: RecoveryLimits = RecoveryLimits()
    protocol_min: int = PROTOCOL_MIN  # of the messages that this router speaks
    protocol_max: int = PROTOCOL_MAX

    @property
    def protocols(self) -> ProtocolRange:
        return ProtocolRange(self.protocol_min, self.protocol_max)
