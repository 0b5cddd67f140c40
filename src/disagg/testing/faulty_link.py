"""A link between two real processes that can be made slow, lossy, damaged, silent or cut while it runs.

    dialler  <->  FaultyLink  <->  upstream

  CONTROL  knows the frames of channel.channel: every message is passed on, delayed, repeated, left out or damaged as
           one. A repeat is numbered like any other message, as if its sender had sent it twice; nothing renumbers the
           ones after a loss.
  DATA     knows the items of transport.wire from dialler to upstream: a push's payload may get one wrong bit. The
           answers pass as they are. Delay, bandwidth, silence and cuts hold for both ways.

Silence: connections are accepted, nothing more is taken than buffers hold, nothing is sent, no end is passed on. What
was kept back goes out when the silence is lifted. A cut: connections are closed both ways, new ones are refused.
Everything here runs on the loop in which the link was made.
"""

import asyncio
import contextlib
import enum
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable

import msgspec

from disagg.channel.channel import CHECKSUM_BYTES, LENGTH_BYTES, MAX_FRAME_BYTES, encode_frame
from disagg.core.errors import InternalFault, PeerFault, ProtocolViolation
from disagg.transport.wire import PREFIX_BYTES, TRAILER_BYTES, FrameHeader, Item, decode_body, decode_prefix

PIECE_BYTES = 64 * 1024
MAX_QUEUED = 256  # pieces per direction; then the link stops reading
DIAL_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 1.0
BACKLOG = 64

_log = logging.getLogger(__name__)


class LinkKind(enum.Enum):
    CONTROL = enum.auto()
    DATA = enum.auto()


class LinkFaults(msgspec.Struct, frozen=True):
    """What is wrong with a link now; the default is a link that works. Shares are of 1."""

    delay_s: float = 0.0  # each way
    bytes_per_s: float = float("inf")  # each way
    drop_share: float = 0.0  # of control messages
    duplicate_share: float = 0.0  # of control messages
    corrupt_share: float = 0.0  # of control messages: one bit is flipped
    corrupt_push_share: float = 0.0  # of pushes of KV
    num_corrupt_pushes: int = 0  # so many come first, whatever the share
    is_cut: bool = False
    is_silent: bool = False


WORKS = LinkFaults()


class LinkCounts(msgspec.Struct):
    """What a link has done so far."""

    num_connections: int = 0
    num_cut: int = 0  # connections closed by a cut
    num_units: int = 0  # control messages, and pushes of KV
    num_bytes: int = 0  # passed on, both ways
    num_dropped: int = 0
    num_duplicated: int = 0
    num_corrupted: int = 0


# (payload of a control message, whether it goes from dialler to upstream) -> what to pass on instead
Rewrite = Callable[[bytes, bool], bytes]


class _Connection:
    """Both sockets of one connection through the link."""

    def __init__(self, accepted: socket.socket) -> None:
        self.accepted = accepted  # until there is a writer for it
        self.writers: list[asyncio.StreamWriter] = []

    async def finish(self) -> None:
        """Close both sides once what is written has been taken, within FINISH_TIMEOUT_S."""
        for writer in self.writers:
            writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                for writer in self.writers:
                    await writer.wait_closed()

    def abort(self) -> None:
        if not self.writers:
            self.accepted.close()
        for writer in self.writers:
            writer.transport.abort()


class FaultyLink:
    """Listens at `address`, dials `upstream` for every connection. Made inside a running loop; end it with close()."""

    def __init__(
        self, name: str, kind: LinkKind, rng: random.Random, *, upstream: str = "", rewrite: Rewrite | None = None
    ) -> None:
        self.name = name
        self.upstream = upstream  # "host:port"; may be changed: it holds for new connections
        self.counts = LinkCounts()
        self._kind = kind
        self._rng = rng
        self.rewrite = rewrite
        self._faults = WORKS
        self._num_wrong = 0
        self._loop = asyncio.get_running_loop()
        self._hears = asyncio.Event()
        self._hears.set()
        self._running: dict[asyncio.Task[None], _Connection] = {}
        # The port stays ours while a cut keeps the listener closed.
        self._holder = _bound(("127.0.0.1", 0))
        host, port = self._holder.getsockname()
        self.address = f"{host}:{port}"
        self._listener: socket.socket | None = None
        self._is_closed = False
        self._listen()

    @property
    def faults(self) -> LinkFaults:
        return self._faults

    @property
    def num_open(self) -> int:
        """Connections that the link holds."""
        return len(self._running)

    def set(self, faults: LinkFaults) -> None:
        """From now on, for connections that are open too."""
        self._check_open()
        self._faults = faults
        self._num_wrong = faults.num_corrupt_pushes
        if faults.is_silent:
            self._hears.clear()
        else:
            self._hears.set()
        if faults.is_cut:
            self._refuse()
            self.counts.num_cut += sum(not task.done() for task in self._running)
            self._end_connections()
        elif self._listener is None:
            self._listen()

    async def close(self) -> None:
        """End every connection; nothing is left when it returns. Idempotent."""
        self._is_closed = True
        self._refuse()
        self._holder.close()
        self._end_connections()
        await asyncio.gather(*self._running, return_exceptions=True)

    def check_invariants(self) -> None:
        """Listens unless cut or closed; a closed link holds nothing."""
        is_listening = self._listener is not None
        if is_listening == (self._faults.is_cut or self._is_closed):
            raise InternalFault(f"{self.name}: listening is {is_listening} with {self._faults}")
        if self._hears.is_set() == self._faults.is_silent:
            raise InternalFault(f"{self.name}: hearing is {self._hears.is_set()} with {self._faults}")
        if self._is_closed and any(not task.done() for task in self._running):
            raise InternalFault(f"{self.name}: closed, and {len(self._running)} connections are left")

    def _check_open(self) -> None:
        if self._is_closed:
            raise InternalFault(f"{self.name}: closed links stay as they are")

    # --- connections -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener = _bound(self._holder.getsockname())
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._accept, self._listener)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            self.counts.num_connections += 1
            connection = _Connection(accepted)
            task = self._loop.create_task(self._serve(connection), name=f"{self.name}: connection")
            self._running[task] = connection
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task).abort()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: a connection failed", self.name, exc_info=error)

    def _end_connections(self) -> None:
        for task, connection in list(self._running.items()):
            for writer in connection.writers:
                writer.transport.abort()
            task.cancel()

    async def _serve(self, connection: _Connection) -> None:
        reader, writer = await asyncio.open_connection(sock=connection.accepted)
        connection.writers.append(writer)
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._hears.wait()
            host, _, port = self.upstream.rpartition(":")
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
            connection.writers.append(up_writer)
            pumps.append(asyncio.create_task(self._pump(self._units(reader, is_up=True), up_writer)))
            pumps.append(asyncio.create_task(self._pump(self._units(up_reader, is_up=False), writer)))
            # One way's end is the end: neither protocol goes on with half a connection.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            await connection.finish()
        except (OSError, TimeoutError, ValueError):
            pass  # upstream is not there: the dialler sees its connection closed
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    # --- one direction -----------------------------------------------------------------------------------------

    async def _pump(self, units: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
        """Reads ahead of what is due, so that a delay is no limit to the rate. Ends when all that came is out."""
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(MAX_QUEUED)
        reading = asyncio.create_task(self._read_ahead(units, queue))
        try:
            while (item := await queue.get()) is not None:
                due_s, data = item
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                await self._hears.wait()
                writer.write(data)
                await writer.drain()
                self.counts.num_bytes += len(data)
                await asyncio.sleep(len(data) / self._faults.bytes_per_s)
        except OSError:
            pass  # whoever reads has gone
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._hears.wait()  # the end of one side is not passed on in silence either

    async def _read_ahead(self, units: AsyncIterator[bytes], queue: asyncio.Queue[tuple[float, bytes] | None]) -> None:
        try:
            async for data in units:
                await queue.put((self._loop.time() + self._faults.delay_s, data))
        except (asyncio.IncompleteReadError, OSError, PeerFault) as error:
            _log.debug("%s: one way ends: %s", self.name, error)
        except Exception:  # a fault of this file: the connection ends, the log tells
            _log.exception("%s: one way fails", self.name)
        await queue.put(None)

    def _units(self, reader: asyncio.StreamReader, *, is_up: bool) -> AsyncIterator[bytes]:
        if self._kind is LinkKind.CONTROL:
            return self._messages(reader, is_up=is_up)
        return self._pushes(reader) if is_up else _as_it_comes(reader)

    async def _messages(self, reader: asyncio.StreamReader, *, is_up: bool) -> AsyncIterator[bytes]:
        number = 0
        while True:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
            if length > MAX_FRAME_BYTES:
                raise ProtocolViolation(f"{self.name}: frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            payload = (await reader.readexactly(CHECKSUM_BYTES + length))[CHECKSUM_BYTES:]
            if self.rewrite is not None:
                payload = self.rewrite(payload, is_up)
            self.counts.num_units += 1
            frame = encode_frame(payload, number)
            number += 1
            if self._hits(self._faults.drop_share):
                self.counts.num_dropped += 1
                continue
            yield self._damaged(frame) if self._hits(self._faults.corrupt_share) else frame
            if self._hits(self._faults.duplicate_share):
                self.counts.num_duplicated += 1
                yield encode_frame(payload, number)
                number += 1

    async def _pushes(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Items from sender to receiver; the payload of a push in pieces."""
        while True:
            head = await reader.readexactly(PREFIX_BYTES)
            item = _item_of(head)
            prefix = decode_prefix(head, item)
            body = await reader.readexactly(prefix.num_bytes)
            yield head + body
            if item is not Item.FRAME:
                continue
            self.counts.num_units += 1
            num_left = decode_body(body, prefix, FrameHeader).num_bytes
            wrong_at = self._rng.randrange(num_left) if num_left and self._is_push_wrong() else None
            while num_left:
                piece = await reader.readexactly(min(num_left, PIECE_BYTES))
                num_left -= len(piece)
                if wrong_at is not None:
                    if wrong_at < len(piece):
                        piece, wrong_at = self._damaged(piece, wrong_at), None
                    else:
                        wrong_at -= len(piece)
                yield piece
            yield await reader.readexactly(TRAILER_BYTES)

    def _hits(self, share: float) -> bool:
        return share > 0.0 and self._rng.random() < share

    def _is_push_wrong(self) -> bool:
        if self._num_wrong:
            self._num_wrong -= 1
            return True
        return self._hits(self._faults.corrupt_push_share)

    def _damaged(self, data: bytes, index: int | None = None) -> bytes:
        """One bit of one byte flipped."""
        self.counts.num_corrupted += 1
        changed = bytearray(data)
        changed[self._rng.randrange(len(data)) if index is None else index] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


async def _as_it_comes(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(PIECE_BYTES):
        yield data


def _item_of(head: bytes) -> Item:
    value = int.from_bytes(head[6:8])
    try:
        return Item(value)
    except ValueError:
        raise ProtocolViolation(f"item {value} is none that a sender sends") from None


def _bound(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(address)
    return sock
