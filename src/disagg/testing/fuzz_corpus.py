"""Good input of every kind that a socket may bring, to be damaged: made from the types themselves."""

import enum
import types
import typing

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.kvcache.memory import Segment
from disagg.protocol.handoff import GrantKey, make_grant_key
from disagg.protocol.messages import Message
from disagg.transport.capability import NAME_BYTES, NONCE_BYTES, PROOF_BYTES
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_wire import (
    Admission,
    Answer,
    Copied,
    Farewell,
    Greeting,
    OwnerMessage,
    Permit,
    Progress,
    Request,
    Withdrawal,
    WriterMessage,
)
from disagg.transport.shared_memory_wire import encode as encode_local
from disagg.transport.sharing import SECRET_BYTES
from disagg.transport.wire import Ack, Body, Challenge, FrameHeader, Hello, Item, Welcome, encode

ITEMS: tuple[tuple[Item, type[Challenge] | type[Hello] | type[Welcome] | type[FrameHeader] | type[Ack]], ...] = (
    (Item.CHALLENGE, Challenge),
    (Item.HELLO, Hello),
    (Item.WELCOME, Welcome),
    (Item.FRAME, FrameHeader),
    (Item.ACK, Ack),
)
_LEAVES: dict[object, tuple[object, object]] = {
    bool: (False, True),
    int: (0, 2**40),
    float: (0.0, 1.5),
    str: ("", "worker-0"),
    bytes: (b"", b"k" * 40),
    type(None): (None, None),
}


def good_messages() -> list[object]:
    """Two of each kind: everything empty or least, and everything set."""
    return [_value(kind, is_full=is_full) for kind in typing.get_args(Message) for is_full in (False, True)]


def good_keys() -> list[bytes]:
    handoff_id = HandoffId(SequenceId(RequestId(Incarnation(5), 1), 0), 1)
    fence = Fence(Incarnation(2**61), Incarnation(3), 1)
    return [GrantKey(handoff_id, fence).encode(), make_grant_key(b"seed", handoff_id, fence)]


def good_items() -> list[bytes]:
    """Encoded, with their prefix."""
    name, proof = b"n" * NAME_BYTES, b"p" * PROOF_BYTES
    runs = SegmentArray.of([Segment(i * 64, 64) for i in range(40)])
    bodies: tuple[tuple[Item, Body], ...] = (
        (Item.CHALLENGE, Challenge(b"c" * NONCE_BYTES)),
        (Item.HELLO, Hello(WorkerId("prefill-0"), Incarnation(1), Incarnation(2), True, 0, proof)),
        (Item.WELCOME, Welcome(None)),
        (Item.WELCOME, Welcome("no")),
        (Item.FRAME, FrameHeader(name, 0, b"", b"", 0, proof)),
        (Item.FRAME, FrameHeader(name, 7, b"tag", runs.pack(), 2560, proof)),
        (Item.ACK, Ack(name, 1, None)),
        (Item.ACK, Ack(name, 2**60, "why")),
    )
    return [encode(item, body) for item, body in bodies]


def good_locals() -> list[bytes]:
    """What two neighbours in shared memory say."""
    runs = SegmentArray.of([Segment(i * 64, 64) for i in range(40)])
    messages: tuple[WriterMessage | OwnerMessage, ...] = (
        Greeting(WorkerId("prefill-0"), Incarnation(2), b"s" * SECRET_BYTES),
        Greeting(WorkerId("prefill-0"), Incarnation(2), b"s" * SECRET_BYTES, is_probe=True),
        Request(7, b"key", 3, b"tag", runs.pack(), 2560),
        Progress(7, 64),
        Copied(7, 2**64 - 1),
        Withdrawal(7),
        Farewell(),
        Admission(None, 1 << 20),
        Admission("no", 0),
        Permit(7),
        Answer(7, None),
        Answer(7, "why"),
    )
    return [encode_local(message) for message in messages]


def _value(kind: object, *, is_full: bool) -> object:
    """A value of an annotated type: the least one, or one with everything in it."""
    kind = getattr(kind, "__supertype__", kind)  # NewType
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _LEAVES:
        return _LEAVES[kind][is_full]
    if origin in (typing.Union, types.UnionType):
        return _value(args[0] if is_full else args[-1], is_full=is_full)
    if origin is tuple and args[-1] is Ellipsis:
        return tuple(_value(args[0], is_full=True) for _ in range(2 if is_full else 0))
    if origin is tuple:
        return tuple(_value(each, is_full=is_full) for each in args)
    if origin is typing.Annotated:
        return _value(args[0], is_full=is_full)
    if origin in (dict, frozenset, list):
        return origin()
    if not isinstance(kind, type):
        raise InternalFault(f"no example of {kind}: teach _value about it")
    if issubclass(kind, enum.Enum):
        return list(kind)[-1 if is_full else 0]
    if issubclass(kind, Segment):
        return Segment(0, 64)
    if not issubclass(kind, msgspec.Struct):
        raise InternalFault(f"no example of {kind}: add one to _LEAVES")
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return kind(**{field.name: _value(hints[field.name], is_full=is_full) for field in fields})
