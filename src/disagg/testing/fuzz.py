"""Feeds every decoder that reads from a socket with bytes that nobody sane would send.

    python -m disagg.testing.fuzz --inputs 1000000 --seed 1

Inputs are good ones, damaged: bits flipped, cut, spliced, lengths made huge, nesting made deep; and plain noise. Each
target may accept an input or refuse it in its own way; anything else is a crash and is printed with its input. Memory
is looked at before and after: a decoder that keeps something of what it refused would show.
"""

import argparse
import asyncio
import logging
import random
import resource
import socket
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, cast

import msgspec

from disagg.channel.channel import MAX_FIRST_FRAME_BYTES, Channel, encode_frame
from disagg.core.errors import PeerFault, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.spans import Span
from disagg.kvcache.memory import Segment
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import Message
from disagg.testing.fuzz_corpus import ITEMS, good_items, good_keys, good_locals, good_messages
from disagg.testing.memory import BytesMemory
from disagg.transport.capability import frame_proof, grant_name
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_wire import Request, decode_owner, decode_writer
from disagg.transport.stream import Stream
from disagg.transport.tcp_dial import Introduction, introduce
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.wire import PREFIX_BYTES, FrameHeader, Item, Prefix, decode_body, decode_prefix, encode
from disagg.worker.courier import PushTag

MAX_GROWTH_BYTES = 64 << 20
LIVE_SHARE = 0.001  # of inputs that go through real sockets
WARM_UP_INPUTS = 20_000  # allocators have settled after so many
_DEEP = b"\x91" * 3000
_HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")

_MESSAGES: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(cast(type, Message))
_TAGS = msgspec.msgpack.Decoder(PushTag)


class Outcome(msgspec.Struct):
    """How often a target took an input, and how often it refused one."""

    num_accepted: int = 0
    num_refused: int = 0


def decode_message(data: bytes) -> bool:
    """The payload of a control frame, of any direction."""
    try:
        _MESSAGES.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def decode_items(data: bytes) -> bool:
    """The data path's items: prefix, then body; a body also with a prefix that fits it."""
    num_accepted = 0
    for item, kind in ITEMS:
        try:
            prefix = decode_prefix(data[:PREFIX_BYTES].ljust(PREFIX_BYTES, b"\0"), item)
            body = data[PREFIX_BYTES : PREFIX_BYTES + prefix.num_bytes]
            _read_body(body, prefix, kind)
            num_accepted += 1
        except ProtocolViolation:
            pass
        body = data[PREFIX_BYTES:]
        try:
            _read_body(body, Prefix(len(body), zlib.crc32(body)), kind)
            num_accepted += 1
        except ProtocolViolation:
            pass
    return num_accepted > 0


def _read_body(data: bytes, prefix: Prefix, kind: type[Any]) -> None:
    """As a receiver does. Raises ProtocolViolation."""
    body = decode_body(data, prefix, kind)
    if isinstance(body, FrameHeader):
        SegmentArray.unpack(body.destination)


def decode_small(data: bytes) -> bool:
    """Grant keys and tags, which travel inside messages and frames."""
    num_accepted = 0
    decoders: tuple[Callable[[bytes], object], ...] = (decode_grant_key, _TAGS.decode)
    for decode in decoders:
        try:
            decode(data)
            num_accepted += 1
        except (msgspec.DecodeError, RecursionError):
            pass
    return num_accepted > 0


def decode_local(data: bytes) -> bool:
    """What two neighbours in shared memory say to each other."""
    num_accepted = 0
    decoders: tuple[Callable[[bytes], object], ...] = (_read_writer, decode_owner)
    for decode in decoders:
        try:
            decode(data)
            num_accepted += 1
        except ProtocolViolation:
            pass
    return num_accepted > 0


def _read_writer(data: bytes) -> None:
    """As the owner of an arena does. Raises ProtocolViolation."""
    message = decode_writer(data)
    if isinstance(message, Request):
        SegmentArray.unpack(message.destination)


class _NobodyWrites:
    """Where a channel that only reads would write to."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


async def read_frames(data: bytes) -> bool:
    """The control connection's frames, to the end of the bytes."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    writer = cast(asyncio.StreamWriter, _NobodyWrites())
    channel = Channel(reader, writer, _MESSAGES, max_first_bytes=MAX_FIRST_FRAME_BYTES)
    num_read = 0
    try:
        while True:
            await channel.receive(timeout_s=5.0)
            num_read += 1
    except PeerFault:
        return num_read > 0


class LiveTarget:
    """A receiver on a real socket: an honest greeting, then bytes."""

    def __init__(self) -> None:
        self._memory = BytesMemory(4096)
        self._own, self._its = Incarnation(3), Incarnation(4)
        self._receiver = TcpReceiver(self._memory, self._own, lambda event: None, stall_timeout_s=2.0)
        self._receiver.grant(WorkerId("fuzz"), b"key", [Segment(0, 1024)])

    def push(self, data: bytes) -> bool:
        endpoint = self._receiver.endpoint_for(WorkerId("fuzz"), self._its)
        host, _, port = endpoint.address.rpartition(":")
        stream = Stream(socket.create_connection((host, int(port)), 5.0), 2.0)
        try:
            introduce(stream, Introduction(WorkerId("fuzz"), self._its, self._own, True), endpoint.token, 0)
            stream.send_raw(data)
            stream.finish_sending()
            stream.receive_prefix(Item.ACK)
            return True
        except PeerFault:
            return False
        finally:
            stream.close()

    def good(self) -> bytes:
        proof, run = frame_proof(b"key", bytes(16), 0), SegmentArray.of([Segment(0, 64)]).pack()
        return encode(Item.FRAME, FrameHeader(grant_name(b"key"), 0, b"", run, 64, proof)) + bytes(72)

    def close(self) -> None:
        self._receiver.check_invariants()
        self._receiver.close()
        if self._memory.num_commits:
            raise ProtocolViolation(f"{self._memory.num_commits} writes landed without a proof")


class Fuzzer:
    """One seed gives one row of inputs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.messages = [msgspec.msgpack.encode(message) for message in good_messages()]
        self.frames = [encode_frame(payload, 0) for payload in self.messages]
        self.items = good_items()
        self.small = [*good_keys(), msgspec.msgpack.encode(PushTag(Span(0, 16, 0, 2)))]
        self.locals = good_locals()

    def damaged(self, corpus: list[bytes]) -> bytes:
        """One input."""
        rng = self._random
        if rng.random() < 0.1:
            return rng.randbytes(rng.choice([0, 1, 8, 16, 17, 64, 300]))
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            data = self._damage(data, corpus)
        return bytes(data)

    def framed(self) -> bytes:
        """Control frames: half of them with right lengths and checksums, so that what is inside is reached."""
        if self._random.random() < 0.5:
            return self.damaged(self.frames)
        return encode_frame(self.damaged(self.messages), 0) + self.damaged(self.frames)

    def _damage(self, data: bytearray, corpus: list[bytes]) -> bytearray:
        rng = self._random
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice([0, 0x7F, 0x80, 0x91, 0xC0, 0xC1, 0xCF, 0xD9, 0xDD, 0xFF])
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                data[at : at + 5] = rng.choice(_HUGE)
            case 5:
                data[at:at] = _DEEP
            case _:
                other = rng.choice(corpus)
                data[at:] = other[rng.randrange(len(other) + 1) :]
        return data

    def is_live(self) -> bool:
        return self._random.random() < LIVE_SHARE

    def pick(self) -> int:
        return self._random.randrange(5)


async def run(num_inputs: int, seed: int) -> tuple[dict[str, Outcome], float]:
    """Outcomes by target, and seconds. Raises whatever a target should not have raised, with its input as a note."""
    live = LiveTarget()
    try:
        started_s = time.perf_counter()
        outcomes = await _feed(Fuzzer(seed), live, num_inputs, seed)
        return outcomes, time.perf_counter() - started_s
    finally:
        live.close()


async def _feed(fuzzer: Fuzzer, live: LiveTarget, num_inputs: int, seed: int) -> dict[str, Outcome]:
    outcomes = {name: Outcome() for name in ("message", "items", "small", "local", "frames", "live")}
    plain: tuple[tuple[str, Callable[[bytes], bool], Callable[[], bytes]], ...] = (
        ("message", decode_message, lambda: fuzzer.damaged(fuzzer.messages)),
        ("items", decode_items, lambda: fuzzer.damaged(fuzzer.items)),
        ("small", decode_small, lambda: fuzzer.damaged(fuzzer.small)),
        ("local", decode_local, lambda: fuzzer.damaged(fuzzer.locals)),
    )
    for _ in range(num_inputs):
        which, name, data = fuzzer.pick(), "", b""
        try:
            if fuzzer.is_live():
                name, data = "live", fuzzer.damaged([live.good()])
                taken = await asyncio.to_thread(live.push, data)
            elif which < len(plain):
                name, target, make = plain[which]
                data = make()
                taken = target(data)
            else:
                name, data = "frames", fuzzer.framed()
                taken = await read_frames(data)
        except Exception as error:
            error.add_note(f"{name}: input of {len(data)} bytes, seed {seed}: {data[:400].hex()}")
            raise
        outcomes[name].num_accepted += taken
        outcomes[name].num_refused += not taken
    return outcomes


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # every refusal would be told
    asyncio.run(run(WARM_UP_INPUTS, args.seed + 1))
    before = rss_bytes()
    outcomes, elapsed_s = asyncio.run(run(args.inputs, args.seed))
    after = rss_bytes()
    for name, outcome in outcomes.items():
        print(f"{name:8} {outcome.num_accepted:>9} accepted  {outcome.num_refused:>9} refused")
    print(f"{args.inputs} inputs, seed {args.seed}: {args.inputs / elapsed_s:.0f}/s, 0 crashes")
    print(f"memory {before >> 20} MiB before, {after >> 20} MiB after; {MAX_GROWTH_BYTES >> 20} MiB more is too much")
    record = {"inputs": args.inputs, "seed": args.seed, "per_s": args.inputs / elapsed_s, "crashes": 0}
    print(msgspec.json.encode(record | {"rss_before": before, "rss_after": after}).decode())
    return 0 if after - before <= MAX_GROWTH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
