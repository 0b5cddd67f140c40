"""A worker's own /metrics over HTTP, for who scrapes workers one by one. Off unless a port is given.

One answer per connection. Whoever asks slowly, at length or in numbers is let go: nobody is asked who he is.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus

from disagg.core.endpoints import join_address
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.telemetry.exposition import CONTENT_TYPE

PATH = "/metrics"
MAX_HEADER_BYTES = 8 << 10
MAX_CONNECTIONS = 16
ANSWER_TIMEOUT_S = 5.0  # from the connection to the last byte read


class MetricsPage:
    """On the loop's thread: what it shows is read between two events."""

    def __init__(self, text: Callable[[], bytes]) -> None:
        self._text = text
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> str:
        """Gives "host:port". Raises ConfigurationError when the address cannot be bound."""
        try:
            self._server = await asyncio.start_server(self._welcome, host, port, limit=MAX_HEADER_BYTES)
        except OSError as error:
            text = f"cannot show metrics at {host}:{port}: {error.strerror or error}; choose another --metrics-port"
            raise ConfigurationError(text) from None
        bound: socket.socket = self._server.sockets[0]
        return join_address(*bound.getsockname()[:2])

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def check_invariants(self) -> None:
        if len(self._answering) > MAX_CONNECTIONS:
            raise InternalFault(f"{len(self._answering)} are answered at once, the limit is {MAX_CONNECTIONS}")

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answering) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_too_much = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            with contextlib.suppress(OSError, TimeoutError, *asked_too_much):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    writer.write_eof()
                    await writer.drain()
                    await reader.read(1)  # until the other side has read all and closes: else a reset may overtake it
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].decode("ascii", "replace").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path != PATH:
            return _response(HTTPStatus.NOT_FOUND, f"there is only {PATH} here\n".encode())
        if method != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET\n")
        return _response(HTTPStatus.OK, self._text())


def _response(status: HTTPStatus, body: bytes) -> bytes:
    kind = CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
