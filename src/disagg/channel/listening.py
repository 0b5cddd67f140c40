"""Accepts control connections, within bounds that hold before anybody has said who they are.

1. accept; one more than max_connections is closed at once
2. a stranger until its first message has been dealt with (TLS first, where there are keys): each has a deadline of
   its own, and where there are too many the oldest goes. A good peer needs milliseconds.
3. then whoever serves it owns the channel
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from disagg.channel.channel import MAX_FIRST_FRAME_BYTES, Channel, M
from disagg.channel.tally import Refusal, Tally
from disagg.core.endpoints import join_address

_log = logging.getLogger(__name__)

MAX_STRANGERS = 64
MAX_CONNECTIONS = 1024
TLS_TIMEOUT_S = 5.0
_BACKLOG = 128
_OUT_OF_DESCRIPTORS_S = 0.05


class Listener:
    """A listening socket and the connections that came by it."""

    def __init__(
        self,
        sock: socket.socket,
        open_channel: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        *,
        tls: ssl.SSLContext | None,
        refused: Tally,
        max_strangers: int,
        max_connections: int,
    ) -> None:
        self.refused = refused
        self._sock = sock
        self._open_channel = open_channel
        self._tls = tls
        self._max_strangers = max_strangers
        self._max_connections = max_connections
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._transports: set[asyncio.WriteTransport] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @property
    def address(self) -> str:
        """The "host:port" it listens on, with the real port where 0 was asked."""
        return join_address(*self._sock.getsockname()[:2])

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    def close(self) -> None:
        """Accept nobody any more and let the strangers go. What is served already stays. Idempotent."""
        if self._sock.fileno() < 0:  # closed before
            return
        asyncio.get_running_loop().remove_reader(self._sock)  # now: its descriptor may be another's in a moment
        self._accepting.cancel()
        for task in self._strangers:
            task.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._strangers, return_exceptions=True)

    def check_invariants(self) -> None:
        assert len(self._strangers) <= self._max_strangers, f"{len(self._strangers)} strangers"
        assert len(self._transports) <= self._max_connections, f"{len(self._transports)} connections"

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                _log.warning("accept on %s failed: %s", self.address, error)
                await asyncio.sleep(_OUT_OF_DESCRIPTORS_S)  # do not spin until some are free
                continue
            self._transports = {each for each in self._transports if not each.is_closing()}
            if len(self._transports) >= self._max_connections:
                self.refused.add(Refusal.FULL)
                sock.close()
                continue
            if len(self._strangers) >= self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
                self.refused.add(Refusal.FULL)
            task = loop.create_task(self._welcome(sock))
            self._strangers[task] = None
            task.add_done_callback(partial(self._is_dealt_with, sock))

    def _is_dealt_with(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        if task.cancelled():  # perhaps before it began
            sock.close()
        elif (error := task.exception()) is not None:
            _log.error("a connection could not be served", exc_info=error)

    async def _welcome(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        timeout_s = TLS_TIMEOUT_S if self._tls is not None else None
        try:
            sock.setblocking(False)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            self.refused.add(Refusal.NO_TLS)
            _log.info("a connection was refused: %s", error)
            return
        except BaseException:
            sock.close()
            raise
        self._transports.add(transport)
        try:
            await self._open_channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except BaseException:
            transport.abort()
            raise


async def listen(
    host: str,
    port: int,
    decoder: msgspec.msgpack.Decoder[M],
    serve: Callable[[Channel[M]], Awaitable[None]],
    *,
    tls: ssl.SSLContext | None = None,
    max_strangers: int = MAX_STRANGERS,
    max_connections: int = MAX_CONNECTIONS,
) -> Listener:
    """Accept connections; `serve` is awaited with each Channel, and owns it when it returns. Raises OSError."""
    refused = Tally()

    async def open_channel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(Channel(reader, writer, decoder, max_first_bytes=MAX_FIRST_FRAME_BYTES, refused=refused))

    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        undo.pop_all()
    return Listener(
        sock, open_channel, tls=tls, refused=refused, max_strangers=max_strangers, max_connections=max_connections
    )
