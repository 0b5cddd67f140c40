"""Requests' bodies: none larger or slower than allowed, and not too many large ones in memory at once."""

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request

from disagg.core.errors import InternalFault
from disagg.router.fields import DEFAULT_MAX_DEPTH
from disagg.router.http_errors import Refused, body_too_large, body_too_slow, too_many_large_bodies

FREE_BYTES: Final = 64 << 10  # of each body: small ones never wait for room, and the clients there are bound their sum


class BodyLimits(msgspec.Struct, frozen=True):
    """What clients may send, and how long one may take over it."""

    max_bytes: int = 8 << 20
    max_depth: int = DEFAULT_MAX_DEPTH  # of nested JSON
    timeout_s: float = 30.0  # for the whole body, once its headers are here
    max_held_bytes: int = 256 << 20  # of all bodies that are being read or understood, past FREE_BYTES of each


DEFAULT_LIMITS = BodyLimits()


class Body:
    """One request's body, in memory until it is released."""

    def __init__(self, bodies: "Bodies") -> None:
        self.content = b""
        self._bodies = bodies
        self._num_held = 0

    async def fill(self, request: Request) -> None:
        """Raises Refused when it grows too large, or larger than there is room for."""
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            self._bodies.check_size(size)
            self._num_held += self._bodies.hold(size - FREE_BYTES - self._num_held)
            parts.append(part)
        self.content = b"".join(parts)

    def release(self) -> None:
        """It has been understood, or nobody wants to know any more. Idempotent."""
        self.content = b""
        self._bodies.let_go(self._num_held)
        self._num_held = 0


class Bodies:
    """Those that one router holds."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._max_held = max(limits.max_held_bytes, limits.max_bytes)  # one alone always has room
        self.num_held_bytes = 0

    async def read(self, request: Request) -> Body:
        """A whole body, to be released. Raises Refused, and holds nothing then."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self.check_size(int(declared))
        body = Body(self)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                await body.fill(request)
        except TimeoutError:
            body.release()
            raise Refused(body_too_slow(self.limits.timeout_s)) from None
        except BaseException:
            body.release()
            raise
        return body

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_bytes:
            raise Refused(body_too_large(self.limits.max_bytes))

    def hold(self, num_bytes: int) -> int:
        """How many more are held now: none where there are none to hold. Raises Refused where there is no room."""
        if num_bytes <= 0:
            return 0
        if self.num_held_bytes + num_bytes > self._max_held:
            raise Refused(too_many_large_bodies(self._max_held))
        self.num_held_bytes += num_bytes
        return num_bytes

    def let_go(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes

    def check_invariants(self) -> None:
        """Raises InternalFault when more is held than may be, or less than nothing."""
        if not 0 <= self.num_held_bytes <= self._max_held:
            raise InternalFault(f"{self.num_held_bytes} bytes of bodies are held, the limit is {self._max_held}")
