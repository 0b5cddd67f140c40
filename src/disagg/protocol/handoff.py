"""Both ends of a hand-off as tables, and the key of its grant.

Source (whoever has or computes the KV):
  1. QUEUED: nothing asked yet. The reservation is asked when the first chunk is about to run.
  2. ASKING: the destination has been asked. A refusal puts it back to QUEUED.
  3. OPEN: blocks are granted; every computed layer is pushed.
  4. DRAINING: the prompt is computed, the last pushes are on their way.
  5. DELIVERED: the destination's transport has verified every byte; blocks stay until it says TAKEN or the lease ends.
  6. STOPPING: cancelled while bytes of ours are still being read by the transport.

Destination (whoever will use it):
  1. EXPECTED: the router has announced the sequence; no blocks yet.
  2. RECEIVING: blocks are reserved, the peer may write.
  3. COMPLETE: all layers are verified and the first token is here; the grant is being withdrawn.
  4. FENCING: given up; blocks stay in quarantine until the transport's fence holds.
  5. IN_STEP: given up and fenced, but a part of its first step is in the engine: the quarantine goes on.

Partial start (a first step that begins before all KV is here, and runs in parts: ranges of layers):
  1. WAITING: for KV of more layers, for its turn, or until the blocks are its own.
  2. RUNNING: a part is in the engine.
  3. STOPPING: given up while a part is in the engine.
"""

import enum
import hashlib

import msgspec

from disagg.core.ids import Fence, HandoffId
from disagg.protocol.table import TransitionTable


class SourceState(enum.StrEnum):
    QUEUED = "QUEUED"
    ASKING = "ASKING"
    OPEN = "OPEN"
    DRAINING = "DRAINING"
    DELIVERED = "DELIVERED"
    STOPPING = "STOPPING"
    CLOSED = "CLOSED"


class SourceTrigger(enum.StrEnum):
    RESERVATION_REQUESTED = "reservation requested"
    RESERVATION_GRANTED = "reservation granted"
    RESERVATION_REFUSED = "reservation refused"
    PREFILL_FINISHED = "prefill finished"
    WRITES_ACKNOWLEDGED = "writes acknowledged"
    TAKEN = "taken"
    CANCELLED = "cancelled"  # with no write outstanding
    CANCELLED_MIDWAY = "cancelled midway"  # writes outstanding: wait until the transport has stopped
    WRITES_STOPPED = "writes stopped"


class DestinationState(enum.StrEnum):
    EXPECTED = "EXPECTED"
    RECEIVING = "RECEIVING"
    COMPLETE = "COMPLETE"
    FENCING = "FENCING"
    IN_STEP = "IN_STEP"
    CLOSED = "CLOSED"


class DestinationTrigger(enum.StrEnum):
    RESERVED = "reserved"
    ALL_VERIFIED = "all verified"
    GRANT_FENCED = "grant fenced"
    GRANT_FENCED_IN_STEP = "grant fenced in step"
    STEP_OVER = "step over"
    CANCELLED = "cancelled"


class PartialState(enum.StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    THROWN_AWAY = "THROWN_AWAY"


class PartialTrigger(enum.StrEnum):
    PART_STARTED = "part started"
    PART_FINISHED = "part finished"
    LAST_PART_FINISHED = "last part finished"
    GIVEN_UP = "given up"  # also when the engine has failed
    GIVEN_UP_MIDWAY = "given up midway"  # a part is in the engine: wait until it comes back


_S, _ST = SourceState, SourceTrigger
SOURCE_TABLE: TransitionTable[SourceState, SourceTrigger] = TransitionTable(
    "hand-off source",
    _S.QUEUED,
    {
        (_S.QUEUED, _ST.RESERVATION_REQUESTED): _S.ASKING,
        (_S.QUEUED, _ST.CANCELLED): _S.CLOSED,
        (_S.ASKING, _ST.RESERVATION_GRANTED): _S.OPEN,
        (_S.ASKING, _ST.RESERVATION_REFUSED): _S.QUEUED,
        (_S.ASKING, _ST.CANCELLED): _S.CLOSED,
        (_S.OPEN, _ST.PREFILL_FINISHED): _S.DRAINING,
        (_S.OPEN, _ST.CANCELLED): _S.CLOSED,
        (_S.OPEN, _ST.CANCELLED_MIDWAY): _S.STOPPING,
        (_S.DRAINING, _ST.WRITES_ACKNOWLEDGED): _S.DELIVERED,
        (_S.DRAINING, _ST.CANCELLED): _S.CLOSED,
        (_S.DRAINING, _ST.CANCELLED_MIDWAY): _S.STOPPING,
        (_S.DELIVERED, _ST.TAKEN): _S.CLOSED,
        (_S.DELIVERED, _ST.CANCELLED): _S.CLOSED,
        (_S.STOPPING, _ST.WRITES_STOPPED): _S.CLOSED,
    },
)

_D, _DT = DestinationState, DestinationTrigger
DESTINATION_TABLE: TransitionTable[DestinationState, DestinationTrigger] = TransitionTable(
    "hand-off destination",
    _D.EXPECTED,
    {
        (_D.EXPECTED, _DT.RESERVED): _D.RECEIVING,
        (_D.EXPECTED, _DT.CANCELLED): _D.CLOSED,
        (_D.RECEIVING, _DT.ALL_VERIFIED): _D.COMPLETE,
        (_D.RECEIVING, _DT.CANCELLED): _D.FENCING,
        (_D.COMPLETE, _DT.GRANT_FENCED): _D.CLOSED,
        (_D.COMPLETE, _DT.CANCELLED): _D.FENCING,
        (_D.FENCING, _DT.GRANT_FENCED): _D.CLOSED,
        (_D.FENCING, _DT.GRANT_FENCED_IN_STEP): _D.IN_STEP,
        (_D.IN_STEP, _DT.STEP_OVER): _D.CLOSED,
    },
)

_P, _PT = PartialState, PartialTrigger
PARTIAL_TABLE: TransitionTable[PartialState, PartialTrigger] = TransitionTable(
    "partial start",
    _P.WAITING,
    {
        (_P.WAITING, _PT.PART_STARTED): _P.RUNNING,
        (_P.WAITING, _PT.GIVEN_UP): _P.THROWN_AWAY,
        (_P.RUNNING, _PT.PART_FINISHED): _P.WAITING,
        (_P.RUNNING, _PT.LAST_PART_FINISHED): _P.FINISHED,
        (_P.RUNNING, _PT.GIVEN_UP): _P.THROWN_AWAY,
        (_P.RUNNING, _PT.GIVEN_UP_MIDWAY): _P.STOPPING,
        (_P.STOPPING, _PT.PART_FINISHED): _P.THROWN_AWAY,
    },
)


CAPABILITY_BYTES = 32


class GrantKey(msgspec.Struct, frozen=True, array_like=True):
    """Permits one peer to write into one reservation; differs between incarnations and attempts.

    The ids say what the key is for; `capability` makes it unforgeable. Whoever knows the key may write: it travels over
    the control connection only, and the transport proves it without showing it.
    Each rank of the source writes under a key of its own: its numbers are its own too.
    """

    handoff_id: HandoffId
    fence: Fence
    capability: bytes = b""
    source_rank: int = 0

    def of_rank(self, source_rank: int) -> "GrantKey":
        return msgspec.structs.replace(self, source_rank=source_rank)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def make_grant_key(seed: bytes, handoff_id: HandoffId, fence: Fence) -> bytes:
    """The encoded key of a reservation. `seed` is the destination's secret of at most 64 bytes, drawn at its start:

    without it the capability cannot be guessed, whatever other capabilities are known.
    """
    named = GrantKey(handoff_id, fence).encode()
    capability = hashlib.blake2b(named, key=seed, digest_size=CAPABILITY_BYTES).digest()
    return GrantKey(handoff_id, fence, capability).encode()


_KEY_DECODER = msgspec.msgpack.Decoder(GrantKey)


def decode_grant_key(key: bytes) -> GrantKey:
    """Raises msgspec.DecodeError for bytes that are no key."""
    try:
        return _KEY_DECODER.decode(key)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep to be a key") from None
