"""A lean HTTP/1.1 client over asyncio: stamps each read when it returns, keeps connections for the next request.

    post() ─▶ an idle connection or a new one ─▶ bytes of the body to on_body(now_s, data) ─▶ status when it is over

General clients copy and buffer what they read; at hundreds of streams their own time would be part of every figure.
"""

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from disagg.core.errors import ConfigurationError

OnBody = Callable[[float, bytes], None]
MAX_ERROR_BYTES = 4096
CONNECT_TIMEOUT_S = 10.0
_DELIMITERS = frozenset({b"content-length", b"transfer-encoding"})


class ConnectionBroken(ConnectionError):
    """The server went away, or what it sent is no HTTP."""


def why_silent(error: OSError) -> str:
    """Why nobody has answered, in a few words."""
    if f"[Errno {errno.ECONNREFUSED}]" in str(error):  # of a name with several addresses it says so of each
        return "nobody listens there"
    if isinstance(error, ConnectionBroken) or getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
        return f"{error.strerror or error}: is it http, or https?"
    return error.strerror or str(error) or "no answer in time"


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.is_idle = False
        self.num_read = 0  # bytes of the exchange under way
        self.status = 0
        self._is_delimited = False  # the answer says where it ends; else the connection's end is its own
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: OnBody | None = None
        self._over: asyncio.Future[int] | None = None
        self._now_s = 0.0

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """The status, when the whole answer has come. Raises ConnectionBroken, and what on_body raises."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroken("the connection was closed")
        self.is_idle = False
        self.num_read, self.status, self._is_delimited = 0, 0, False
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._over
        finally:
            self._over = self._on_body = None
            if not self.is_idle:
                self.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.num_read += len(data)
        if self._parser is None or self._over is None:
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionBroken(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if error is None and self.status and not self._is_delimited:
            self.on_message_complete()
            return
        why = f" ({error})" if error else ""
        self._fail(ConnectionBroken(f"the connection was lost after {self.num_read} bytes of the answer{why}"))

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_delimited |= name.lower() in _DELIMITERS

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._on_body is None:
            return
        try:
            self._on_body(self._now_s, data)
        except ValueError as error:  # the parser would pass it on as one of its own
            self._on_body = None
            self._fail(error)

    def on_message_complete(self) -> None:
        if self._over is not None and not self._over.done():
            assert self._parser is not None
            self.is_idle = self._parser.should_keep_alive() and self.is_open
            self._over.set_result(self.status)

    def _fail(self, error: Exception) -> None:
        self.is_idle = False
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)
        self.abort()


class HttpClient:
    """Connections to one server. For one event loop; use as an async context manager."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None) -> None:
        """url: scheme, host and port; a path before the API's own is kept. Raises ConfigurationError.

        tls: for https; without one the server must be known to the system's authorities.
        """
        address = urlsplit(url)
        try:
            port = address.port
        except ValueError:
            raise ConfigurationError(f"{url!r} has a port that is no number up to 65535") from None
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigurationError(f"{url!r} is no URL such as http://127.0.0.1:8000")
        self.url = url
        self._host = address.hostname
        self._tls = (tls or ssl.create_default_context()) if address.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = address.path.rstrip("/").removesuffix("/v1")
        lines = [f"Host: {address.netloc.rpartition('@')[2]}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        self._head = "\r\n".join(lines)
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._open:
            connection.abort()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def warm(self, num_connections: int) -> None:
        """Connect ahead of time. Raises OSError, TimeoutError."""
        made = await asyncio.gather(*(self._connect() for _ in range(num_connections)))
        self._idle.extend(made)

    async def post(self, path: str, content: bytes, on_body: OnBody) -> int:
        """The status. Raises OSError when the server cannot be reached or the answer breaks off.

        on_body may raise ValueError for what it cannot use: that ends the exchange and is raised here.
        """
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}\r\nContent-Type: application/json\r\n"
        return await self._send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, on_body)

    async def get(self, path: str, *, at_root: bool = False) -> tuple[int, bytes]:
        """Status and body. Raises OSError. at_root: without the path of the URL."""
        parts: list[bytes] = []
        head = f"GET {'' if at_root else self._path}{path} HTTP/1.1\r\n{self._head}\r\n\r\n".encode()
        status = await self._send(head, lambda now_s, data: parts.append(data))
        return status, b"".join(parts)

    async def _send(self, request: bytes, on_body: OnBody) -> int:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                self._open.discard(connection)
                continue
            try:
                return await self._exchange(connection, request, on_body)
            except ConnectionBroken:
                # The server closed it as we wrote: it has not seen the request if it has not answered at all.
                if connection.num_read:
                    raise
        return await self._exchange(await self._connect(), request, on_body)

    async def _exchange(self, connection: _Connection, request: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.exchange(request, on_body)
        finally:
            if connection.is_idle:
                self._idle.append(connection)
            else:
                self._open.discard(connection)
        return status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._open.add(connection)
        return connection

    def check_invariants(self) -> None:
        assert all(connection.is_idle or connection.num_read == 0 for connection in self._idle)
        assert set(self._idle) <= self._open
