"""What two tcp ends say to each other, and its bounds.

    sender                                   receiver
                                      <-     CHALLENGE  a nonce for this connection
    HELLO   who I am, whom I expect,  ->
            proof of the pairing
                                      <-     WELCOME  or why not, then closed
    FRAME   header, proof of the grant ->
            payload, 8-byte trailer   ->
                                      <-     ACK      verified, or why not; one per frame, in order

Every item is a 16-byte prefix and a msgpack body. The prefix carries the body's CRC-32: a damaged header must be found
before its payload lands anywhere. The trailer is the XXH3 of the payload, seeded with the header's CRC-32: it follows
the payload so that both ends sum while they copy.
"""

import enum
import struct
import zlib
from typing import Annotated, TypeVar

import msgspec

from disagg.core.errors import ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.transport.capability import NAME_BYTES, NONCE_BYTES, PROOF_BYTES

MAGIC = b"DgKV"
VERSION = 3

MAX_HELLO_BYTES = 2048
MAX_HEADER_BYTES = 1 << 20  # about 65,000 segments
MAX_ACK_BYTES = 4096
MAX_CHALLENGE_BYTES = 64
MAX_KEY_BYTES = 256
MAX_TAG_BYTES = 4096
MAX_LANES = 64  # connections from one sender to one receiver
PROBE_LANE = MAX_LANES  # of a connection that only measures
MAX_PROBE_BYTES = 16 << 20  # of one frame that measures
MAX_WORKER_ID_CHARS = 256
MAX_REASON_CHARS = 600

_PREFIX = struct.Struct("!4sHHII")
_TRAILER = struct.Struct("!Q")
PREFIX_BYTES = _PREFIX.size
TRAILER_BYTES = _TRAILER.size

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class Item(enum.IntEnum):
    """What follows a prefix."""

    HELLO = 1
    WELCOME = 2
    FRAME = 3
    ACK = 4
    CHALLENGE = 5


MAX_BODY_BYTES: dict[Item, int] = {
    Item.HELLO: MAX_HELLO_BYTES,
    Item.WELCOME: MAX_HELLO_BYTES,
    Item.FRAME: MAX_HEADER_BYTES,
    Item.ACK: MAX_ACK_BYTES,
    Item.CHALLENGE: MAX_CHALLENGE_BYTES,
}


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's first word: what every proof on this connection must be made for."""

    nonce: _Nonce


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The sender's first word. `checksums` must be the same on both ends. A lane is one of its connections to here."""

    sender: Annotated[WorkerId, msgspec.Meta(max_length=MAX_WORKER_ID_CHARS)]
    sender_incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=2**63 - 1)]
    destination_incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=2**63 - 1)]
    checksums: bool
    lane: Annotated[int, msgspec.Meta(ge=0, le=PROBE_LANE)]
    proof: _Proof


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's answer."""

    refusal: _Reason | None


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """One write, without its bytes."""

    name: _Name  # of the grant; PROBE for bytes that only measure
    number: _Count
    tag: Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]
    destination: bytes  # segments, as SegmentArray packs them
    num_bytes: _Count
    proof: _Proof


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """What became of one frame."""

    name: _Name
    number: _Count
    failure: _Reason | None


PROBE = bytes(NAME_BYTES)
NO_PROOF = bytes(PROOF_BYTES)

Body = Challenge | Hello | Welcome | FrameHeader | Ack
_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T", Challenge, Hello, Welcome, FrameHeader, Ack)


class Prefix(msgspec.Struct, frozen=True):
    """Size and CRC-32 of the body that follows."""

    num_bytes: int
    checksum: int


def encode(item: Item, body: Body) -> bytes:
    """Prefix and body. Raises ProtocolViolation when the body is over its bound."""
    data = _encoder.encode(body)
    limit = MAX_BODY_BYTES[item]
    if len(data) > limit:
        raise ProtocolViolation(f"{item.name} of {len(data)} bytes is over the limit of {limit}; split it")
    return _PREFIX.pack(MAGIC, VERSION, item, len(data), zlib.crc32(data)) + data


def checksum_of(encoded: bytes) -> int:
    """The body's CRC-32 in what encode() returned: where the payload's sum starts."""
    return int(_PREFIX.unpack_from(encoded)[4])


def decode_prefix(data: bytes | bytearray, expected: Item) -> Prefix:
    """Check a prefix before a byte is allocated for its body. Raises ProtocolViolation."""
    magic, version, item, num_bytes, checksum = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolViolation(f"{bytes(data[:8])!r} is not the start of a transport item; is the port right?")
    if version != VERSION:
        raise ProtocolViolation(f"transport version {version}, this side speaks {VERSION}; run one release on both")
    if item != expected:
        raise ProtocolViolation(f"item {item} where {expected.name} ({expected.value}) was due")
    if num_bytes > MAX_BODY_BYTES[expected]:
        raise ProtocolViolation(f"{expected.name} of {num_bytes} bytes is over the limit of {MAX_BODY_BYTES[expected]}")
    return Prefix(num_bytes, checksum)


def decode_body(data: bytes | bytearray, prefix: Prefix, kind: type[_T]) -> _T:
    """Check and decode a body. Raises ProtocolViolation."""
    if len(data) != prefix.num_bytes:
        raise ProtocolViolation(f"{kind.__name__} of {len(data)} bytes, its prefix says {prefix.num_bytes}")
    found = zlib.crc32(data)
    if found != prefix.checksum:
        raise ProtocolViolation(f"{kind.__name__} has checksum {found:08x}, its prefix says {prefix.checksum:08x}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"{kind.__name__} does not decode: {error}") from error


def encode_trailer(checksum: int) -> bytes:
    return _TRAILER.pack(checksum)


def decode_trailer(data: bytes | bytearray) -> int:
    return int(_TRAILER.unpack(data)[0])


def clip(reason: str) -> str:
    """A reason short enough for the wire."""
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 3] + "..."
