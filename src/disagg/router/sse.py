"""Server-sent events, and noticing at once that the client has gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies pass tokens on as they come
}

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client closed its connection; nobody is there to be told."""


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

    def __init__(self, next_chunk: Callable[[], Awaitable[bytes | None]], close: Callable[[], Awaitable[None]]) -> None:
        """`next_chunk` gives whole events, None after the last; `close` is called once, however the stream ends."""
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._next_chunk = next_chunk
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_goes(receive, self._send_all(send))
        except (ClientGone, OSError):  # some servers raise OSError when they send into a closed connection
            pass
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (chunk := await self._next_chunk()) is not None:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
