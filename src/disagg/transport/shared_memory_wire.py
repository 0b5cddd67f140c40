"""What the two ends of shared memory say to each other. Bytes of KV never pass here.

    writer                                   owner of the arena
    Greeting   who I am, whom I expect   ->
                                         <-  Admission  with the arena's descriptor; or why not, then closed
    Request    may I write there?        ->
                                         <-  Permit     go on; or Answer: why not
    (the writer copies and sums)
    Progress   so much of it lies there  ->      (of long ones: summed there while the rest is copied)
    Copied     the bytes lie there       ->
                                         <-  Answer     verified as they lie, or why not
    Withdrawal I shall not use a permit  ->
    Farewell   I write no more           ->

A ticket names one request of one connection. Each permit ends in Copied, Withdrawal, Farewell or the writer's death;
nothing else lets the owner give the blocks away. Requests run ahead of copies, so that no copy waits for an answer.
"""

from typing import Annotated

import msgspec

from disagg.core.errors import ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.transport.sharing import SECRET_BYTES
from disagg.transport.wire import MAX_KEY_BYTES, MAX_REASON_CHARS, MAX_TAG_BYTES, MAX_WORKER_ID_CHARS

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Sum = Annotated[int, msgspec.Meta(ge=0)]  # 64 bits
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]

PROBE_BYTES = 4 << 20  # of the memory that copies which only measure go into


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """The writer's first word."""

    sender: Annotated[WorkerId, msgspec.Meta(max_length=MAX_WORKER_ID_CHARS)]
    destination_incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=2**63 - 1)]
    secret: Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)]
    is_probe: bool = False  # only to measure: a small memory of its own is mapped instead of the arena


class Request(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """One write, without its bytes."""

    ticket: _Count
    key: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
    number: _Count
    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    destination: bytes  # segments, as SegmentArray packs them
    num_bytes: _Count


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The first bytes of a permit lie in the arena."""

    ticket: _Count
    num_bytes: _Count


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    """The bytes of a permit lie in the arena."""

    ticket: _Count
    checksum: _Sum  # XXH3 of the bytes in order


class Withdrawal(msgspec.Struct, frozen=True, array_like=True, tag="withdrawal"):
    """A permit that will not be used: nothing more is written under it."""

    ticket: _Count


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """The last word: nothing more is written over this connection."""


class Admission(msgspec.Struct, frozen=True, array_like=True, tag="admission"):
    """The owner's answer to a greeting."""

    refusal: _Reason | None
    num_bytes: _Count  # of the arena


class Permit(msgspec.Struct, frozen=True, array_like=True, tag="permit"):
    """The writer may copy now."""

    ticket: _Count


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The end of a request: verified (failure is None), or why not."""

    ticket: _Count
    failure: _Reason | None


WriterMessage = Greeting | Request | Progress | Copied | Withdrawal | Farewell
OwnerMessage = Admission | Permit | Answer

_encoder = msgspec.msgpack.Encoder()
_writer_decoder: msgspec.msgpack.Decoder[WriterMessage] = msgspec.msgpack.Decoder(WriterMessage)
_owner_decoder: msgspec.msgpack.Decoder[OwnerMessage] = msgspec.msgpack.Decoder(OwnerMessage)


def encode(message: WriterMessage | OwnerMessage) -> bytes:
    return _encoder.encode(message)


def decode_writer(body: bytes | bytearray) -> WriterMessage:
    """Raises ProtocolViolation."""
    try:
        return _writer_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no message of a writer: {error}") from error


def decode_owner(body: bytes | bytearray) -> OwnerMessage:
    """Raises ProtocolViolation."""
    try:
        return _owner_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"no message of an arena's owner: {error}") from error
