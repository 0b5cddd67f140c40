"""Over real sockets: the official client, and clients that go away."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import uvicorn
from starlette.types import Message
from tests.unit.router.site import MakeSite, Site

from disagg.core.errors import ConfigurationError, Overloaded, PeerLost
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.listening import listen
from disagg.testing.generation import FakeTokenStream, Script
from disagg.testing.processes import listening_sockets

DEADLINE_S = 20.0


class Listening:
    """A site behind uvicorn on a free port of this loop."""

    def __init__(self, site: Site) -> None:
        self.site = site
        config = uvicorn.Config(site.app, lifespan="off", log_config=None, timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.socket = listen("127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.task = asyncio.create_task(self.server.serve(sockets=[self.socket]))

    async def stop(self) -> None:
        self.server.should_exit = True
        await asyncio.wait_for(self.task, DEADLINE_S)
        self.socket.close()
        assert self.port not in listening_sockets((os.getpid(),)).values()


@pytest.fixture
async def held(make_site: MakeSite, tokenizer: ModelTokenizer) -> AsyncIterator[Listening]:
    """Streams that stop after two events until somebody releases or aborts them."""
    ids = tuple(tokenizer.encode("a b c d e f g"))
    site = make_site(lambda request: Script(tokens=(ids,), held_after=0 if request.sampling.seed == 1 else 2))
    listening = Listening(site)
    yield listening
    await listening.stop()


@pytest.fixture
async def plain(make_site: MakeSite) -> AsyncIterator[Listening]:
    listening = Listening(make_site())
    yield listening
    await listening.stop()


def post(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(content), content)


async def stream_of(listening: Listening, number: int = 0) -> FakeTokenStream:
    service = listening.site.service
    async with asyncio.timeout(DEADLINE_S):
        while len(service.streams) <= number:
            service.submitted.clear()
            await service.submitted.wait()
        stream = service.streams[number]
        await stream.held.wait()
    return stream


CHAT: dict[str, object] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


# Seed 1 holds before the first token, others after the second: a whole answer has no byte out then either.
@pytest.mark.parametrize(("is_streamed", "seed"), [(True, 1), (False, 1), (False, 2)])
async def test_client_goes_before_the_first_byte(held: Listening, is_streamed: bool, seed: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", held.port)
    writer.write(post("/v1/chat/completions", {**CHAT, "stream": is_streamed, "seed": seed}))
    stream = await stream_of(held)
    assert stream.num_aborts == 0
    writer.close()
    await asyncio.wait_for(stream.aborted.wait(), DEADLINE_S)


async def test_client_goes_in_the_middle_of_a_stream(held: Listening) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", held.port)
    writer.write(post("/v1/chat/completions", {**CHAT, "stream": True}))
    stream = await stream_of(held)
    await asyncio.wait_for(reader.readuntil(b'"content":"a"'), DEADLINE_S)
    assert stream.num_aborts == 0
    writer.close()
    await asyncio.wait_for(stream.aborted.wait(), DEADLINE_S)
    assert stream.num_events == 2


async def test_client_goes_while_several_prompts_wait(held: Listening) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", held.port)
    writer.write(post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]}))
    for number in (0, 1):
        await stream_of(held, number)
    writer.close()
    for stream in held.site.service.streams:
        await asyncio.wait_for(stream.aborted.wait(), DEADLINE_S)


async def test_others_live_on_when_one_goes(held: Listening) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", held.port)
    writer.write(post("/v1/chat/completions", {**CHAT, "stream": True}))
    gone = await stream_of(held)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{held.port}", timeout=DEADLINE_S) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        stays = await stream_of(held, 1)
        writer.close()
        await asyncio.wait_for(gone.aborted.wait(), DEADLINE_S)
        stays.release()
        response = await asyncio.wait_for(request, DEADLINE_S)
    assert response.json()["choices"][0]["message"]["content"] == "a b c d e f g"
    assert stays.num_aborts == 0


async def test_tokens_leave_as_they_come(held: Listening) -> None:
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{held.port}", timeout=DEADLINE_S) as client,
        client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}) as got,
    ):
        assert got.headers["cache-control"] == "no-cache"
        lines = got.aiter_lines()
        first = await asyncio.wait_for(anext(lines), DEADLINE_S)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        (await stream_of(held)).release()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_client_goes_while_text_threads_are_busy(site: Site, text_threads: ThreadPoolExecutor) -> None:
    free = threading.Event()
    busy = [text_threads.submit(free.wait, DEADLINE_S) for _ in range(2)]
    body = json.dumps(CHAT).encode()
    messages: Iterator[Message] = iter(
        [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await asyncio.wait_for(site.app(scope, receive, send), DEADLINE_S)
    free.set()
    assert all(each.result(DEADLINE_S) for each in busy)
    assert sent[0]["status"] == 499
    assert site.service.streams == []


def test_listening() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}.*in use"):
            listen("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S):
            accepted, _ = first.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with pytest.raises(ConfigurationError, match="256\\.1\\.1\\.1"):
        listen("256.1.1.1", 0)


# The official client


def client_of(listening: Listening) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{listening.port}/v1", api_key="x", max_retries=0)


async def test_openai_client_answers(plain: Listening, tokenizer: ModelTokenizer) -> None:
    text = "hello world 🙃"
    plain.site.service.script_for = lambda request: Script(tokens=((*tokenizer.encode(text), 2),))
    async with client_of(plain) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "bare"]
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, n=2
        )
        assert [choice.message.content for choice in chat.choices] == [text, text]
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert chat.choices[0].logprobs is not None
        assert chat._request_id
        completion = await client.completions.create(model="tiny", prompt="hi", logprobs=1)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (text, "stop")


async def test_openai_client_streams(plain: Listening, tokenizer: ModelTokenizer) -> None:
    text = "hello world 🙃"
    plain.site.service.script_for = lambda request: Script(tokens=((*tokenizer.encode(text), 2),))
    async with client_of(plain) as client:
        parts, reasons, usage = "", [], None
        async for chunk in await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts += choice.delta.content or ""
                reasons.append(choice.finish_reason)
        assert (parts, reasons[-1], set(reasons[:-1])) == (text, "stop", {None})
        assert usage is not None
        assert usage.completion_tokens == len(tokenizer.encode(text)) + 1
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join([piece.choices[0].text async for piece in stream]) == text


async def test_openai_client_errors(plain: Listening, tokenizer: ModelTokenizer) -> None:
    ids = tuple(tokenizer.encode("a b c"))
    async with client_of(plain) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="none", prompt="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt=[5] * 5000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
        plain.site.service.script_for = lambda request: Script(refusal=Overloaded("full", retry_after_s=1))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="hi", stream=True)
        plain.site.service.script_for = lambda request: Script((ids,), failure=PeerLost("it died"), failure_after=1)
        with pytest.raises(openai.APIError, match="it died"):
            async for _ in await client.completions.create(model="tiny", prompt="hi", stream=True):
                pass
