"""One control connection.

  1. open: dial() or listening.listen() gives a Channel; the first message is awaited with receive(timeout_s).
  2. start(): from now on each message goes to on_message, in order, on the event loop's thread.
  3. beats go out every beat_interval_s; a peer silent for two of its own is lost, as is one whose stream ends. Time in
     which this side's own loop stood still is not counted.
  4. on_lost is called exactly once; no message is delivered after it.

Frames are a 4-byte big-endian length, a 4-byte checksum and that many bytes of msgpack. The checksum is the CRC-32 of
those bytes, started from the frame's number in its direction: a damaged, missing or repeated frame does not fit. A
length above MAX_FRAME_BYTES (less, before start()), a wrong checksum, or bytes that are no message of the expected
kind, end the connection: nothing is allocated for them and nobody else notices.
"""

import asyncio
import contextlib
import logging
import ssl
import time
import zlib
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from disagg.channel.tally import Refusal, Tally
from disagg.core.endpoints import split_address
from disagg.core.errors import PeerLost, ProtocolViolation
from disagg.protocol.messages import Beat

_log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FIRST_FRAME_BYTES = 256 * 1024  # of a peer that has not said yet who it is
MAX_BUFFERED_BYTES = 64 * 1024 * 1024  # not yet taken by the kernel: the peer has stopped reading
LENGTH_BYTES = 4
CHECKSUM_BYTES = 4
DEFAULT_BEAT_INTERVAL_S = 2.5
MAX_SILENT_BEATS = 2  # any message counts as one
MAX_BEAT_INTERVAL_S = 60.0  # that a peer may claim
MIN_SLEEP_S = 1e-3
LOOKS_PER_BEAT = 4  # so exactly is known for how long this side stood still

M = TypeVar("M")


class Channel(Generic[M]):
    """Sends any message, receives messages of the kind that `decoder` knows."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[M],
        *,
        max_first_bytes: int = MAX_FRAME_BYTES,
        refused: Tally | None = None,
    ) -> None:
        """max_first_bytes: of a frame that comes before start(). refused: where damage is counted."""
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._max_frame_bytes = max_first_bytes
        self._refused = refused
        self._num_sent = 0  # frames
        self._num_received = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._on_lost: Callable[[str], None] | None = None
        self._last_heard_s = time.monotonic()
        self._peer_interval_s = 0.0  # until it says
        self.is_open = True

    @property
    def peer_address(self) -> str:
        host, port = self._writer.get_extra_info("peername", ("?", 0))[:2]
        return f"{host}:{port}"

    def send(self, message: object) -> None:
        """Queue a message. Never blocks; on a lost channel it has no effect: on_lost tells."""
        if not self.is_open or self._writer.is_closing():
            return
        payload = self._encoder.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            self._lose(f"a message of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            return
        self._writer.write(encode_frame(payload, self._num_sent))
        self._num_sent += 1
        if self._writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self._lose(f"the peer has not read {MAX_BUFFERED_BYTES} bytes that wait for it")

    async def receive(self, timeout_s: float) -> M:
        """The next message. Raises PeerLost (end of file, silence) or ProtocolViolation."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError:
            raise PeerLost(f"{self.peer_address} sent nothing for {timeout_s} s") from None

    def start(
        self,
        *,
        beat_interval_s: float,
        on_message: Callable[[M], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Deliver messages from now on. Both callbacks run on this event loop's thread."""
        self._on_lost = on_lost
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._last_heard_s = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._pump(on_message)),
            asyncio.create_task(self._beat(beat_interval_s)),
        ]

    async def close(self, *, flush_timeout_s: float = 1.0) -> None:
        """Send what is queued, within the given time, then close. on_lost is not called. Idempotent."""
        self._on_lost = None
        self.is_open = False
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(flush_timeout_s):
                await self._writer.drain()
        self._writer.close()
        try:
            async with asyncio.timeout(flush_timeout_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    async def _read(self) -> M:
        try:
            return await self._read_frame()
        except ProtocolViolation:
            if self._refused is not None:
                self._refused.add(Refusal.GARBAGE)
            raise

    async def _read_frame(self) -> M:
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
            if length > self._max_frame_bytes:
                text = f"{self.peer_address}: frame of {length} bytes, the limit is {self._max_frame_bytes}"
                raise ProtocolViolation(text)
            checksum = int.from_bytes(await self._reader.readexactly(CHECKSUM_BYTES))
            payload = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise PeerLost("its connection ended") from None
        except OSError as error:
            raise PeerLost(f"its connection broke: {error}") from None
        if frame_checksum(payload, self._num_received) != checksum:
            raise ProtocolViolation(f"{self.peer_address}: frame {self._num_received} is damaged, or one was lost")
        self._num_received += 1
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolViolation(f"{self.peer_address}: not a message of this protocol: {error}") from None

    async def _pump(self, on_message: Callable[[M], None]) -> None:
        try:
            while self.is_open:
                message = await self._read()
                self._last_heard_s = time.monotonic()
                if isinstance(message, Beat):
                    self._peer_interval_s = min(message.interval_s, MAX_BEAT_INTERVAL_S)
                elif self.is_open:
                    on_message(message)
        except (PeerLost, ProtocolViolation) as error:
            self._lose(str(error))
        except Exception as error:  # a channel that nobody reads any more must not look alive
            _log.exception("a message from %s could not be handled", self.peer_address)
            self._lose(f"a message could not be handled: {type(error).__name__}: {error}")

    async def _beat(self, interval_s: float) -> None:
        next_beat_s = time.monotonic()
        while self.is_open:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self.send(Beat(interval_s))
                next_beat_s = now_s + interval_s
            patience_s = MAX_SILENT_BEATS * max(interval_s, self._peer_interval_s)
            lost_s = self._last_heard_s + patience_s
            if now_s >= lost_s:
                silent_s = now_s - self._last_heard_s
                self._lose(f"it has been silent for {silent_s:.1f} s, the limit is {patience_s:g} s")
            wake_s = max(min(next_beat_s, lost_s, now_s + interval_s / LOOKS_PER_BEAT), now_s + MIN_SLEEP_S)
            await asyncio.sleep(wake_s - now_s)
            # While this loop stood still nobody could be heard, and where all of the machine did nobody could speak.
            woken_s = time.monotonic()
            self._last_heard_s = min(self._last_heard_s + max(0.0, woken_s - wake_s), woken_s)

    def _lose(self, reason: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        on_lost, self._on_lost = self._on_lost, None
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._writer.transport.abort()
        if on_lost is not None:  # never from inside send(): whoever sends is in the middle of something
            asyncio.get_running_loop().call_soon(on_lost, reason)


def frame_checksum(payload: bytes, number: int) -> int:
    """Of the frame that is the number-th, from 0, in its direction."""
    return zlib.crc32(payload, number & 0xFFFF_FFFF)


def encode_frame(payload: bytes, number: int) -> bytes:
    """Length, checksum, payload."""
    return len(payload).to_bytes(LENGTH_BYTES) + frame_checksum(payload, number).to_bytes(CHECKSUM_BYTES) + payload


async def dial(
    address: str, decoder: msgspec.msgpack.Decoder[M], *, timeout_s: float, tls: ssl.SSLContext | None = None
) -> Channel[M]:
    """Connect to "host:port"; with `tls` the peer must show a certificate for that host. Raises PeerLost."""
    try:
        host, port = split_address(address)
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except TimeoutError:
        raise PeerLost(f"{address} cannot be reached: no answer for {timeout_s} s") from None
    except ssl.SSLCertVerificationError as error:
        text = f"{address} is not trusted: {error.verify_message}; make the keys of both ends with one authority"
        raise PeerLost(text) from None
    except ssl.SSLError as error:
        raise PeerLost(f"{address} speaks no TLS that fits: {error.reason or error}; give both ends --keys") from None
    except (OSError, ValueError) as error:
        raise PeerLost(f"{address} cannot be reached: {error}") from None
    return Channel(reader, writer, decoder)
