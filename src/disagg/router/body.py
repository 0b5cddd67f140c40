"""Reading a request's body, no larger and no slower than allowed."""

import asyncio

import msgspec
from starlette.requests import Request

from disagg.router.fields import DEFAULT_MAX_DEPTH
from disagg.router.http_errors import Refused, body_too_large, body_too_slow


class BodyLimits(msgspec.Struct, frozen=True):
    """What a client may send, and how long it may take over it."""

    max_bytes: int = 8 << 20
    max_depth: int = DEFAULT_MAX_DEPTH  # of nested JSON
    timeout_s: float = 30.0  # for the whole body, once its headers are here


DEFAULT_LIMITS = BodyLimits()


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Raises Refused when it is too large or does not come in time."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise Refused(body_too_large(limits.max_bytes))
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_bytes:
                    raise Refused(body_too_large(limits.max_bytes))
                parts.append(part)
    except TimeoutError:
        raise Refused(body_too_slow(limits.timeout_s)) from None
    return b"".join(parts)
