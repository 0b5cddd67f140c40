"""The endpoints that show where the time of answered requests went."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disagg.core.errors import InvalidRequest
from disagg.router.access import Access
from disagg.router.http_errors import JSON, Refused, timeline_not_kept
from disagg.telemetry.timeline import TimelineAnswer, lay_out
from disagg.telemetry.track import RequestTrack, TrackStore

DEFAULT_LAST: Final = 20
MAX_LAST: Final = 1000


class Timelines:
    """Of the caller's own requests: whoever has a key sees those of that key."""

    def __init__(self, access: Access, store: TrackStore, threads: Executor) -> None:
        self._access = access
        self._store = store
        self._threads = threads

    async def one(self, request: Request) -> Response:
        caller = self._access.caller(request.headers)
        name = str(request.path_params["request_id"])
        found = self._store.get(name.removeprefix("chatcmpl-").removeprefix("cmpl-"), caller.name)
        if found is None:
            raise Refused(timeline_not_kept(name))
        return await self._laid_out([found])

    async def last(self, request: Request) -> Response:
        caller = self._access.caller(request.headers)
        return await self._laid_out(self._store.last(_number(request), caller.name))

    async def _laid_out(self, tracks: Sequence[RequestTrack]) -> Response:
        """On a thread: of many choices it takes long, and ended tracks change no more."""

        def written() -> bytes:
            return msgspec.json.encode(TimelineAnswer(tuple(map(lay_out, tracks))))

        return Response(await asyncio.get_running_loop().run_in_executor(self._threads, written), media_type=JSON)


def _number(request: Request) -> int:
    text = request.query_params.get("last", str(DEFAULT_LAST))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LAST):
        raise InvalidRequest(f"'last' is {text[:64]!r}: it must be 1 to {MAX_LAST}", param="last")
    return int(text)
