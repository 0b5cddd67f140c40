"""Tokens that are written the moment they come: the same bytes as those that a task waits for, and the same ends."""

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from tests.unit.router.played import TO_WORKER, Place, PlayedWorker, RawClient, asked, card
from tests.unit.router.site import Tls
from tests.unit.worker.rigs import until

from disagg.channel.channel import dial
from disagg.core.ids import Incarnation
from disagg.core.request import SamplingParams
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.stream import GenerateRequest, StreamEvent, TokensDelivered
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.protocol.messages import RegisterWorker
from disagg.router.answer import Usage
from disagg.router.app import create_app
from disagg.router.choice import Piece
from disagg.router.completions import CompletionFormat
from disagg.router.connection import ChunkedBody, ConnectionLimits
from disagg.router.listening import listen
from disagg.router.parser_names import ToolParser
from disagg.router.server import HttpServer
from disagg.router.service import LiveService
from disagg.router.text import ModelText
from disagg.router.timing import Timing

DEADLINE_S = 20.0
HIGH_WATER_BYTES = 64 << 10  # where a transport says that its client does not keep up
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER = " hello world 🙃, how are you"
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture
async def place(
    request: pytest.FixtureRequest, tokenizer: ModelTokenizer, text_threads: ThreadPoolExecutor
) -> AsyncIterator[Place]:
    tls: Tls | None = request.getfixturevalue("either_scheme") if "either_scheme" in request.fixturenames else None
    config = DispatcherConfig(incarnation=Incarnation(5), tokenizer_digests={"tiny": tokenizer.digest})
    service = LiveService(Dispatcher(config), beat_interval_s=2.5)
    channel = await dial(await service.listen("127.0.0.1", 0), TO_WORKER, timeout_s=DEADLINE_S)
    channel.send(RegisterWorker(card(tokenizer.digest, tokenizer.vocab_size)))
    await channel.receive(DEADLINE_S)
    texts = {"tiny": ModelText(tokenizer, tool_parser=ToolParser.HERMES)}
    app = create_app(service, texts, text_threads=text_threads, timing=Timing(9, lambda: 1.0))
    server = HttpServer(app, getattr(request, "param", ConnectionLimits()), tls.files if tls else None)
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # who does not read is noticed soon
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.push_async_callback(service.close)
        stack.push_async_callback(channel.close)
        worker = PlayedWorker(channel, tokenizer.encode(ANSWER))
        yield Place(service, worker, app, server, listener.getsockname()[1], tls.trusting if tls else None)
        service.check_invariants()
        server.should_exit = True
        await asyncio.wait_for(serving, DEADLINE_S)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that was written at once."""
    parts: list[bytes] = []
    write = ChunkedBody.write

    def note(self: ChunkedBody, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(ChunkedBody, "write", note)
    return parts


async def read(place: Place, path: str, **fields: object) -> list[str]:
    """A stream whose first two tokens, which are timed, are with the client before the worker goes on."""
    async with asyncio.timeout(DEADLINE_S):
        client = await RawClient.ask(place, path, **fields)
        await until(lambda: bool(place.worker.sent))
        for number in range(2):
            place.worker.step()
            await client.token()
            if number == 0 and path != COMPLETIONS:
                await client.token()  # the one before named the role
        await place.has_open(int(str(fields.get("n", 1))))  # the others have begun when the first one's prompt was read
        place.worker.finish()
        return await client.rest()


async def read_without_server(place: Place, path: str, **fields: object) -> list[str]:
    """The same where nothing can be written at once."""
    transport = httpx.ASGITransport(app=place.app)
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        asking = asyncio.create_task(client.post(path, json=asked(path, fields)))
        await until(lambda: bool(place.worker.sent))
        for _ in range(2):
            place.worker.step()
        await place.has_open(int(str(fields.get("n", 1))))
        place.worker.finish()
        return [each for each in (await asking).text.split("\n\n") if each]


def by_choice(events: Sequence[str]) -> list[str]:
    """Without names and times; of several choices those of the first come first."""
    bare = [re.sub(r'"id":"[^"]*",("object":"[^"]*"),"created":\d+', r"\1", each) for each in events]
    return sorted(bare, key=lambda each: int(found[1]) if (found := re.search(r'"index":(\d+)', each)) else len(bare))


def text_of(events: Sequence[str]) -> str:
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def whole_text(tokenizer: ModelTokenizer, num_answers: int) -> str:
    return tokenizer.decode(tokenizer.encode(ANSWER) * num_answers)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"stream_options": COUNTED}, {"n": 2}, {"stop": ["are"]}], ids=str
)
async def test_events_are_those_that_a_task_waits_for(
    place: Place, written: list[bytes], path: str, fields: dict[str, Any]
) -> None:
    if "logprobs" in fields and path != COMPLETIONS:
        fields = {"logprobs": True, "top_logprobs": 1}
    waited = await read_without_server(place, path, max_tokens=24, **fields)
    assert written == []
    pushed = await read(place, path, max_tokens=24, **fields)
    assert by_choice(pushed) == by_choice(waited)
    if "n" in fields or "stop" in fields:
        assert written == []
    else:  # all but the first, the last, and what is before and after the text
        assert len(pushed) - 6 <= len(written) < len(pushed)
    parts = [part.decode().rstrip() for part in written]
    assert any(pushed[start : start + len(parts)] == parts for start in range(len(pushed)))


async def test_text_that_is_held_back_writes_nothing(
    place: Place, written: list[bytes], tokenizer: ModelTokenizer
) -> None:
    place.worker.answer = tokenizer.encode("the quick brown <tool_c fox jumps over")
    asked_for = {"max_tokens": len(place.worker.answer), "tools": [{"type": "function", "function": {"name": "f"}}]}
    waited = await read_without_server(place, CHAT, **asked_for)
    pushed = await read(place, CHAT, **asked_for)
    assert by_choice(pushed) == by_choice(waited)
    assert any("<tool_c" in each for each in pushed)
    assert 0 < len(written) < len(place.worker.answer) - 5


@pytest.mark.usefixtures("either_scheme")
async def test_a_client_that_falls_behind_is_waited_for_and_misses_nothing(
    place: Place, written: list[bytes], tokenizer: ModelTokenizer
) -> None:
    num_answers = 200
    client = await RawClient.ask(place, COMPLETIONS, max_tokens=num_answers * len(place.worker.answer))
    await place.has_open(1)
    for _ in range(2):
        place.worker.step()
        await client.token()
    await step_until(place, lambda: place.connection.flow.write_paused)
    num_written = len(written)
    (stream,) = place.service._streams.values()
    await step_until(place, lambda: len(stream._events) >= 3)  # there they wait, not in the socket
    assert len(written) == num_written > 0
    # So much is on its way: in the router's buffer, below TLS too, and in those of the sockets, which are small.
    assert sum(map(len, written)) < 2 * HIGH_WATER_BYTES
    place.worker.finish()
    async with asyncio.timeout(DEADLINE_S):
        assert text_of(await client.rest()) == whole_text(tokenizer, num_answers)


async def step_until(place: Place, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            place.worker.step()
            await asyncio.sleep(0)


@pytest.mark.usefixtures("either_scheme")
@pytest.mark.parametrize("place", [ConnectionLimits(write_timeout_s=0.3)], indirect=True)
async def test_a_client_that_stops_reading_is_cut_off(place: Place) -> None:
    client = await RawClient.ask(place, COMPLETIONS, max_tokens=9000)
    await place.has_open(1)
    (sequence_id,) = place.worker.sent
    for _ in range(2):
        place.worker.step()
        await client.token()
    await step_until(place, lambda: not place.has_clients or place.connection.flow.write_paused)
    await until(lambda: place.worker.aborted == [sequence_id])
    await until(lambda: not place.has_clients)
    client.leave()


@pytest.mark.usefixtures("either_scheme")
async def test_a_client_that_goes_between_two_tokens(place: Place, written: list[bytes]) -> None:
    client = await RawClient.ask(place, COMPLETIONS, max_tokens=24)
    await place.has_open(1)
    (sequence_id,) = place.worker.sent
    for _ in range(4):
        place.worker.step()
        await client.token()
    assert len(written) == 3
    client.leave()
    await until(lambda: place.worker.aborted == [sequence_id])


async def test_a_client_that_has_asked_ahead_goes_as_any(place: Place) -> None:
    """Over TLS its going is seen when the answer ends: whose reading is paused is not told of the end."""
    client = await RawClient.ask(place, COMPLETIONS, connection="keep-alive", max_tokens=9000)
    await place.has_open(1)
    (sequence_id,) = place.worker.sent
    for _ in range(3):
        place.worker.step()
        await client.token()
    client.ask_ahead()
    await until(lambda: bool(place.connection.pipeline))
    client.leave()
    async with asyncio.timeout(DEADLINE_S):
        while not place.worker.aborted and place.worker.sent:
            place.worker.step()
            await asyncio.sleep(0.001)
    assert place.worker.aborted == [sequence_id]


@pytest.mark.usefixtures("either_scheme")
async def test_tokens_for_a_client_that_has_just_gone_are_nobodys_fault(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    client = await RawClient.ask(place, COMPLETIONS, max_tokens=9000)
    await place.has_open(1)
    for _ in range(3):
        place.worker.step()
        await client.token()
    client.leave()
    await step_until(place, lambda: bool(place.worker.aborted))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_fault_in_one_answer_is_no_fault_of_its_step(
    place: Place, written: list[bytes], tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = CompletionFormat.piece

    def piece(self: CompletionFormat, piece: Piece, usage: Usage | None = None) -> bytes:
        if self._head.id == "cmpl-5-0" and len(written) >= 4:
            raise ZeroDivisionError
        return sound(self, piece, usage)

    monkeypatch.setattr(CompletionFormat, "piece", piece)
    clients = []
    for number in range(2):
        clients.append(await RawClient.ask(place, COMPLETIONS, max_tokens=len(place.worker.answer)))
        await place.has_open(number + 1)
    broken = next(iter(place.worker.sent))
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            place.worker.step()
            for client in clients:
                await client.token()
        assert len(written) == 4
        place.worker.step()
        events = await clients[0].rest()
        assert "[DONE]" not in events[-1]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
        await until(lambda: place.worker.aborted == [broken])
        place.worker.finish()
        assert text_of(await clients[1].rest()) == whole_text(tokenizer, 1)


async def test_a_stream_offers_tokens_to_a_reader_that_waits_and_ends_as_any(place: Place) -> None:
    stream = place.service.submit(GenerateRequest("tiny", (1, 2, 3), SamplingParams(7, temperature=0.0)))
    taken: list[TokensDelivered] = []
    is_taking = True

    def take(event: TokensDelivered) -> bool:
        if is_taking:
            taken.append(event)
        return is_taking

    stream.push_to(take)
    await place.has_open(1)
    (live,) = place.service._streams.values()
    reading = aiter(stream.events())
    place.worker.step()
    place.worker.step()
    await until(lambda: len(live._events) == 2)  # nobody waits for them
    async with asyncio.timeout(DEADLINE_S):
        events: list[StreamEvent] = [await anext(reading), await anext(reading)]
        waiting = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        place.worker.step()
        place.worker.step()
        await until(lambda: len(taken) == 2)
        is_taking = False
        place.worker.step()
        events.append(await waiting)
        is_taking = True
        place.worker.finish()
        events += [event async for event in reading]
    delivered = [event for event in events if isinstance(event, TokensDelivered)]
    positions = [[token.position for event in some for token in event.tokens] for some in (delivered, taken)]
    assert positions == [[0, 1, 4, 6], [2, 3, 5]]
