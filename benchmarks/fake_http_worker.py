"""A worker as proxies know it, that computes nothing: HTTP requests in, server-sent events out when it is told to step.

It answers what routers ask of workers before they trust them, and refuses gRPC by closing.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from fake_worker import LIMIT_S, MAX_CONTEXT, MODEL

_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_ID: Final = "cmpl-0123456789abcdef-0"
_CARD: Final = {
    "id": MODEL,
    "object": "model",
    "created": 1,
    "owned_by": "fake",
    "root": MODEL,
    "max_model_len": MAX_CONTEXT,
}
_ABOUT: Final = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True}
_ANSWERS: Final[dict[bytes, object]] = {
    b"/v1/models": {"object": "list", "data": [_CARD]},
    b"/version": {"version": "0.20.0"},
    b"/server_info": _ABOUT,
    b"/get_server_info": _ABOUT,
    b"/model_info": _ABOUT,
    b"/get_model_info": _ABOUT,
}


class HttpFakeWorker:
    """Listens on loopback; a token for every open stream whenever it is told to step."""

    def __init__(self, words: Sequence[str]) -> None:
        self.port = 0
        self.step_s: list[float] = []
        self.is_instant = False
        self.open: dict[_Connection, float] = {}  # when it asked
        self._words = words
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        self.step_s = []

    def asked_s(self) -> list[float]:
        return sorted(self.open.values())

    async def has_open(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.open) != count:
                self._changed.clear()
                await self._changed.wait()

    def step(self) -> None:
        """One event for every open stream."""
        event = b"data: " + self.answer(self._words[len(self.step_s) % len(self._words)], None) + b"\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self.step_s.append(time.perf_counter())
        for connection in self.open:
            connection.write(chunk)

    def note(self, connection: "_Connection", *, is_open: bool) -> None:
        """A stream has begun, or its client has gone."""
        if is_open:
            self.open[connection] = time.perf_counter()
        else:
            self.open.pop(connection, None)
        self._changed.set()

    def answer(self, text: str, finish_reason: str | None) -> bytes:
        """A completion of one token, or a part of one."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        body = {"id": _ID, "object": "text_completion", "created": 1_700_000_000, "model": MODEL, "choices": [choice]}
        if finish_reason is not None:
            body["usage"] = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        return msgspec.json.encode(body)

    @property
    def first_word(self) -> str:
        return self._words[0]


class _Connection(asyncio.Protocol):
    """HTTP/1.1 as far as routers use it: requests with a length, one after the other."""

    def __init__(self, worker: HttpFakeWorker) -> None:
        self._worker = worker
        self._transport: asyncio.Transport | None = None
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._worker.note(self, is_open=False)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self._read.startswith(b"PRI * HTTP/2"):
            assert self._transport is not None
            self._transport.abort()
            return
        while (head_end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:head_end]
            fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
            end = head_end + 4 + int(fields.get(b"content-length", b"0"))
            if len(self._read) < end:
                return
            body, self._read = self._read[head_end + 4 : end], self._read[end:]
            self._serve(head.split(b" ", 2)[1].partition(b"?")[0], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/completions":
            self._send(msgspec.json.encode(_ANSWERS[path]) if path in _ANSWERS else b"")
        elif msgspec.json.decode(body).get("stream"):
            self.write(_STREAM_HEAD)
            self._worker.note(self, is_open=True)
        else:
            self._send(self._worker.answer(self._worker.first_word, "length"))

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.write(head + body)
