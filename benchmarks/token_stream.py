"""The streaming client of the benchmarks: one connection per answer, every token stamped when it can be read."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Self
from urllib.parse import urlsplit

import msgspec


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int
    prompt_tokens_details: dict[str, int]


class _Choice(msgspec.Struct, frozen=True):
    text: str


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: Usage | None = None


class TokenStream(asyncio.Protocol):
    """One streamed completion over its own connection. sent_s and token_s are readings of time.perf_counter().

    The server writes one event per token; an event is stamped when the read that completes it returns, and is decoded
    only after the end. Use `open()`.
    """

    def __init__(self, request: bytes) -> None:
        self.sent_s = 0.0
        self.token_s: list[float] = []
        self.is_over = asyncio.get_running_loop().create_future()  # raises ConnectionError for a broken answer
        self._request = request
        self._rest = b""
        self._events: list[bytes] = []
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, url: str, body: Mapping[str, object]) -> Self:
        """Connect, then send: the connection's set-up is not part of any time."""
        address = urlsplit(url)
        host, port = address.hostname or "127.0.0.1", address.port or 80
        content = msgspec.json.encode(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10.0):
            _, stream = await loop.create_connection(lambda: cls(request), host, port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            # The chunk that carries the finish reason and the one that carries usage have no text.
            if b'"text":"' in event and b'"text":""' not in event:
                self.token_s.append(now_s)
            self._events.append(event)
        for awaited, reached in self._awaited:
            if len(self.token_s) >= awaited and not reached.done():
                reached.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        is_whole = any(event.endswith(b"data: [DONE]") for event in self._events[-2:])
        failure = ConnectionError(f"the answer broke off ({error}): {(b''.join(self._events) + self._rest)[-600:]!r}")
        for future in (self.is_over, *(reached for _, reached in self._awaited)):
            if future.done():
                continue
            if is_whole or self._transport is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    async def reached(self, num_tokens: int, timeout_s: float) -> None:
        """Until that many tokens have come, or the answer is over. Raises TimeoutError, ConnectionError."""
        if len(self.token_s) < num_tokens and not self.is_over.done():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited.append((num_tokens, future))
            await asyncio.wait_for(future, timeout_s)

    async def finish(self, timeout_s: float) -> None:
        """Until the answer is over. Raises TimeoutError, ConnectionError."""
        try:
            await asyncio.wait_for(self.is_over, timeout_s)
        finally:
            self.abort()

    def abort(self) -> None:
        """Hang up; the router takes the request back. Idempotent."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    @property
    def text(self) -> str:
        return "".join(choice.text for chunk in self._chunks() for choice in chunk.choices)

    @property
    def usage(self) -> Usage:
        """What the server counted. Raises LookupError for an answer that is not over."""
        found = [chunk.usage for chunk in self._chunks() if chunk.usage is not None]
        if not found:
            raise LookupError("this answer has no usage: it did not end, or the request did not ask for it")
        return found[0]

    def _chunks(self) -> Iterator[_Chunk]:
        for event in self._events:
            payload = event.partition(b"data: ")[2]
            if payload and payload != b"[DONE]":
                yield msgspec.json.decode(payload, type=_Chunk)


class Writer:
    """One client that asks again as soon as its answer is over."""

    def __init__(self, url: str, body: Mapping[str, object], answer_timeout_s: float) -> None:
        self.streams: list[TokenStream] = []
        self._url = url
        self._body = body
        self._answer_timeout_s = answer_timeout_s

    async def start(self, num_tokens: int) -> None:
        """Ask for the first time; returns when that many tokens have come."""
        self.streams.append(await TokenStream.open(self._url, self._body))
        await self.streams[0].reached(num_tokens, self._answer_timeout_s)

    async def go_on(self) -> None:
        """Until cancelled. Raises ConnectionError, TimeoutError when an answer fails."""
        while True:
            await self.streams[-1].finish(self._answer_timeout_s)
            self.streams.append(await TokenStream.open(self._url, self._body))

    def stop(self) -> None:
        for stream in self.streams:
            stream.abort()

    def gaps(self, start_s: float, stop_s: float) -> Iterator[tuple[float, float]]:
        """(begin, end) of every gap that ends in the window."""
        for stream in self.streams:
            for begin_s, end_s in itertools.pairwise(stream.token_s):
                if start_s < end_s <= stop_s:
                    yield begin_s, end_s
