"""The endpoints that show where the time of answered requests went."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disagg.core.errors import InvalidRequest
from disagg.router.access import Access
from disagg.router.http_errors import JSON, Refused, timeline_not_kept
from disagg.router.timing import TimelineAnswer
from disagg.telemetry.timeline import TimelineStore

DEFAULT_LAST: Final = 20
MAX_LAST: Final = 1000


class Timelines:
    """Of the caller's own requests: whoever has a key sees those of that key."""

    def __init__(self, access: Access, store: TimelineStore) -> None:
        self._access = access
        self._store = store

    async def one(self, request: Request) -> Response:
        caller = self._access.caller(request.headers)
        name = str(request.path_params["request_id"])
        found = self._store.get(name.removeprefix("chatcmpl-").removeprefix("cmpl-"), caller.name)
        if found is None:
            raise Refused(timeline_not_kept(name))
        return _json(TimelineAnswer((found,)))

    async def last(self, request: Request) -> Response:
        caller = self._access.caller(request.headers)
        return _json(TimelineAnswer(self._store.last(_number(request), caller.name)))


def _number(request: Request) -> int:
    text = request.query_params.get("last", str(DEFAULT_LAST))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LAST):
        raise InvalidRequest(f"'last' is {text[:64]!r}: it must be 1 to {MAX_LAST}", param="last")
    return int(text)


def _json(answer: TimelineAnswer) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
