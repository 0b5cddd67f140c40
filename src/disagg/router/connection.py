"""One client's TCP connection: HTTP by uvicorn and httptools, and an end for every wait.

connected, or a request has begun    its headers must be here within header_timeout_s, and be small
headers are here                     the body has its own limit (`body`)
answered                             the next request must begin within keep_alive_s
what we wrote is not read            within write_timeout_s, or the connection is cut and the work for it ends

The same over TLS, whose handshake and goodbye have their ends too (`server`).
"""

import asyncio
import time
from typing import Any, Final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from disagg.router.sse import DIRECT_BODY
from disagg.router.timing import RECEIVED_S

MAX_HEADER_BYTES: Final = 64 << 10


class ConnectionLimits(msgspec.Struct, frozen=True):
    """How long a client may take."""

    header_timeout_s: float = 10.0
    write_timeout_s: float = 60.0  # to read what is waiting for it
    keep_alive_s: float = 30.0  # between two requests


DEFAULT_CONNECTION_LIMITS: Final = ConnectionLimits()


class ChunkedBody:
    """Writes parts of a response that uvicorn has begun, chunk by chunk as it does itself, and will end."""

    __slots__ = ("_flow", "_write")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._flow = flow
        self._write = transport.write

    @property
    def is_ready(self) -> bool:
        """Not while the client leaves too much unread."""
        return not self._flow.write_paused

    def write(self, part: bytes) -> None:
        """The part is not empty: that would be the end."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection with deadlines. One timer at a time waits for the client's headers."""

    limits: ConnectionLimits = DEFAULT_CONNECTION_LIMITS

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._headers_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # that are not answered
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.scheme == "https":
            # What the socket's own buffer has no room for stays with the stream, as without TLS: no second buffer.
            transport.set_write_buffer_limits(high=1)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers()
        # uvicorn leaves its own timer running after an error, and the connection in memory with it.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells only the last one, which may wait for the others
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.flow.pause_writing()  # for good: a TLS transport that is gone may not even be written to

    def data_received(self, data: bytes) -> None:
        was_waiting = self._headers_due is not None
        super().data_received(data)
        if self.transport.is_closing():
            self._end_timers()
        elif not self._has_request:
            self._await_headers()
            self._num_header_bytes += len(data)
            if was_waiting and self._num_header_bytes > MAX_HEADER_BYTES:
                self.send_400_response(f"the request's headers are longer than {MAX_HEADER_BYTES} bytes")
                self._end_timers()

    @property
    def _has_request(self) -> bool:
        """Whether the headers of one are here and its answer is not yet complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DIRECT_BODY: {"body": ChunkedBody(self.transport, self.flow)}}
        self.scope["state"][RECEIVED_S] = time.monotonic()

    def on_headers_complete(self) -> None:
        self._stop_headers_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [each for each in (*self._cycles, self.cycle) if not each.response_complete]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_due is None:
            self._read_due = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None
        super().resume_writing()

    def _await_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)

    def _stop_headers_timer(self) -> None:
        self._num_header_bytes = 0
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _end_timers(self) -> None:
        self._stop_headers_timer()
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None


def connection_class(limits: ConnectionLimits) -> type[ClientConnection]:
    """The connection with these limits: uvicorn makes instances itself and passes nothing on."""
    return type("LimitedConnection", (ClientConnection,), {"limits": limits})
