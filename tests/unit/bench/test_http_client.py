"""Answers as servers of all kinds give them, over real sockets: what counts as whole, and what as which failure."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from disagg.bench.client import Api, OpenAiClient
from disagg.bench.http_client import HttpClient
from disagg.bench.prompts import PromptSource
from disagg.bench.record import Lapse, RequestRecord
from disagg.bench.workload import Run, WorkRequest

TIMEOUT_S = 30.0
WORD = b'data: {"choices":[{"text":"w"}]}\n\n'
DONE = b"data: [DONE]\n\n"
OLD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # its end is the connection's


def sized(body: bytes, status: bytes = b"200 OK", missing: int = 0) -> bytes:
    """missing: bytes that are promised and do not come."""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body) + missing, body)


def delta(name: bytes) -> bytes:
    return b'data: {"choices":[{"delta":{"%b":"w"}}]}\n\n' % name


@contextlib.asynccontextmanager
async def answering(answer: bytes, *, is_kept: bool = False) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, and ends the connection unless it is kept."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(answer)
                await writer.drain()
                if not is_kept:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def ask(answer: bytes) -> RequestRecord:
    request = WorkRequest(0, 0.0, (Run(2, 3),), 4)
    async with answering(answer) as url, HttpClient(url) as http:
        client = OpenAiClient(http, PromptSource(1), api=Api.TEXT, model="m", timeout_s=TIMEOUT_S)
        record = await client.ask(request, client.prepare(request), 0.0)
        http.check_invariants()
        return record


@pytest.mark.parametrize(
    ("answer", "num_tokens"),
    [
        (sized(WORD + WORD + DONE), 2),
        (OLD + WORD + WORD + WORD + DONE, 3),
        (sized(delta(b"content") + delta(b"reasoning_content") + delta(b"reasoning") + delta(b"refusal") + DONE), 3),
        (sized(b": hello\n\n" + WORD + b'event: x\ndata: {"choices":[],"usage":null}\n\n' + DONE), 1),
    ],
)
async def test_an_answer_is_whole_with_its_end_mark_however_it_ends(answer: bytes, num_tokens: int) -> None:
    record = await ask(answer)
    assert (record.lapse, record.detail) == (None, "")
    assert len(record.token_s) == num_tokens


@pytest.mark.parametrize(
    ("answer", "lapse", "said"),
    [
        (OLD + WORD, Lapse.BROKEN, "no end mark"),
        (OLD, Lapse.BROKEN, "no end mark"),
        (sized(WORD + DONE, missing=5), Lapse.CONNECTION, "the connection was lost after"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", Lapse.CONNECTION, "the connection was lost after"),
        (sized(WORD + b"data: hello\n\n" + DONE), Lapse.BROKEN, "hello"),
        (sized(b'data: {"choices":7}\n\n' + DONE), Lapse.BROKEN, "no event of an OpenAI-compatible server"),
        (sized(b'{"choices":[{"text":"all at once"}]}'), Lapse.BROKEN, "it began '{"),
        (sized(WORD + b'data: {"error":{"message":"no more"}}\n\n' + DONE), Lapse.ERROR_EVENT, "no more"),
        (sized(DONE), Lapse.EMPTY, "no event with text"),
        (sized(b'{"error":"broken"}', b"500 Oh"), Lapse.STATUS, "HTTP 500: "),
        (sized(b'{"error":"later"}', b"429 Later"), Lapse.REFUSED, "HTTP 429: "),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Lapse.CONNECTION, "not HTTP"),
        (b"", Lapse.CONNECTION, "lost after 0 bytes"),
    ],
)
async def test_what_is_no_whole_answer_is_said_by_its_kind(answer: bytes, lapse: Lapse, said: str) -> None:
    record = await ask(answer)
    assert record.lapse is lapse, record.detail
    assert said in record.detail


async def test_a_connection_is_used_again_unless_its_end_was_the_answers() -> None:
    bodies: list[bytes] = []
    async with answering(sized(b"{}"), is_kept=True) as url, HttpClient(url) as http:
        for _ in range(3):
            status, body = await http.get("/x")
            bodies.append(body)
            http.check_invariants()
            assert status == 200
    async with answering(OLD + b"old") as url, HttpClient(url) as http:
        for _ in range(2):
            bodies.append((await http.get("/x"))[1])
            http.check_invariants()
    assert bodies == [b"{}"] * 3 + [b"old"] * 2
