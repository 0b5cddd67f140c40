"""Server-sent events, and noticing at once that the client has gone.

A stream's task asks its source for the next chunk and sends it, until there is none. Where the server can write without
waiting (its scope has DIRECT_BODY), the source writes what comes meanwhile itself: no task wakes for it. A client that
does not keep up is the task's again, which waits for it while the source holds back what follows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
DIRECT_BODY: Final = "disagg.direct_body"  # extension of the ASGI scope: {"body": DirectBody}
_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies pass tokens on as they come
}

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client closed its connection; nobody is there to be told."""


class DirectBody(Protocol):
    """Writes parts of a response that has started and has no Content-Length."""

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up; where it does not, send() waits for it."""

    def write(self, part: bytes) -> None:
        """At once, in its turn. The part is not empty."""


class ChunkSource(Protocol):
    """What an EventStream sends."""

    async def next(self) -> bytes | None:
        """Whole events; b"" when there is nothing to show yet, None after the last."""

    def push_to(self, body: DirectBody) -> None:
        """From now on, what comes while next() waits may be written straight to the body while that is ready."""


def event(json: bytes) -> bytes:
    """One event. JSON has no raw line break, so one data line is enough."""
    return b"data: " + json + b"\n\n"


async def unless_client_goes(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; when the client disconnects first, cancel it and raise ClientGone. The body is read already."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed response that stops its source as soon as the client goes."""

    media_type = "text/event-stream"

    def __init__(self, source: ChunkSource, close: Callable[[], Awaitable[None]]) -> None:
        """`close` is called once, however the stream ends."""
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._source = source
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: DirectBody | None = scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body")
        try:
            await unless_client_goes(receive, self._send_all(send, body))
        except (ClientGone, OSError):  # some servers raise OSError when they send into a closed connection
            pass
        finally:
            await self._close()

    async def _send_all(self, send: Send, body: DirectBody | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if body is not None:
            self._source.push_to(body)
        while (chunk := await self._source.next()) is not None:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
