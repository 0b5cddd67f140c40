"""`disagg serve` as a person uses it: ready, asked by the official client, ended in every way, and nothing is left."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.e2e.api_paths import PATHS, Paths
from tests.e2e.cluster import SMALL, Front, caught, completion

from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

MODEL = "tiny-llama"
PAIR = PATHS["disaggregated"]
TIMEOUT_S = 60.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("plain paths")]


@pytest.fixture
def serve(plain_paths: Paths) -> Serve:
    return plain_paths.serves["disaggregated"]


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    with Front(serve.url) as front:
        yield front


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="-", max_retries=0, http_client=http) as client:
        yield client


def test_it_says_where_it_is_and_how_to_try_it(serve: Serve, front: Front) -> None:
    assert f"{MODEL} is ready at {serve.url}" in serve.output
    assert any(line.lstrip().startswith("curl ") and serve.url in line for line in serve.lines)
    assert front.health().json() == {"status": "ok", "models": [{"model": MODEL, "is_ready": True, "missing": ""}]}
    assert sorted(worker.worker_id for worker in front.cluster().workers) == ["decode-0", "prefill-0"]


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "the quick brown fox"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 4
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usages = "", []
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages += [chunk.usage] if chunk.usage is not None else []
    assert text == answer.choices[0].message.content
    assert [usage.completion_tokens for usage in usages] == [answer.usage.completion_tokens // 2]


def test_the_official_client_completes_and_streams(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    whole = client.completions.create(
        model=MODEL, prompt="hello world", max_tokens=12, temperature=0, logprobs=1, extra_body=extra
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or ()) == 12
    stream = client.completions.create(
        model=MODEL, prompt="hello world", max_tokens=12, temperature=0, stream=True, extra_body=extra
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    several = client.completions.create(
        model=MODEL, prompt=["hello world", "once upon"], max_tokens=12, temperature=0, extra_body=extra
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == whole.choices[0].text


def test_the_official_client_stops_at_a_string(client: openai.OpenAI) -> None:
    def complete(stop: list[str]) -> openai.types.CompletionChoice:
        answer = client.completions.create(
            model=MODEL, prompt="hello world", max_tokens=40, temperature=0, stop=stop, extra_body={"ignore_eos": True}
        )
        return answer.choices[0]

    whole = complete([]).text
    stop = next(c for c in whole[10:] if c.isascii() and c.isprintable())
    answer = complete([stop])
    assert answer.finish_reason == "stop"
    assert answer.text == whole[: whole.index(stop)]


def test_the_official_client_gets_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'another' is not served here; served: tiny-llama"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=9.0)
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])


def test_every_choice_of_one_step_arrives(front: Front) -> None:
    """Several choices may end in the same step, and a one-token answer with its prompt."""
    for max_tokens in (1, 2, 5):
        answers = front.complete(MODEL, "the lazy dog", max_tokens, n=8)
        assert [len(answer.tokens) for answer in answers] == [max_tokens] * 8
        assert len({answer.tokens for answer in answers}) == 1


def test_a_cached_prompt_is_told_even_with_one_token(front: Front) -> None:
    prompt = list(range(202, 102, -1))  # begins like nobody else's
    for is_first in (True, False):
        usage = front.post(completion(MODEL, prompt, 1)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (0 if is_first else 96)


def test_a_client_that_goes_ends_its_request_everywhere(serve: Serve, front: Front) -> None:
    """Long before the end of a lease: nothing runs, nothing is held, and the counter of tokens stands still."""
    before = front.wait_counted()
    writer = serve.pid_of("decode-0")
    body = completion(MODEL, list(range(3, 40)), 600, stream=True)
    with caught(front, body, [writer], num_events=3) as stream:
        stream.response.close()
        wait_until(lambda: not front.cluster().router.num_open_requests, TIMEOUT_S, "the router to let go of it")
    seen = front.wait_counted(TIMEOUT_S).since(before)
    front.wait_idle(2, TIMEOUT_S)
    assert seen.total(table.SEQUENCES, role="decode", outcome="cancelled") == 1
    assert seen.total(table.REQUESTS, outcome="aborted") == 1
    written = seen.total(table.OUTPUT_TOKENS)
    assert written < 600 * seen.total(table.SEQUENCES, role="decode")
    looks: list[int] = []

    def has_looked_often() -> bool:
        looks.append(front.readings().since(before).total(table.OUTPUT_TOKENS))
        return len(looks) > 30

    wait_until(has_looked_often, TIMEOUT_S, "30 looks at the counters")
    assert set(looks) == {written}


def test_the_watch_can_fail(serve: Serve) -> None:
    """A living worker is something left behind."""
    with pytest.raises(InternalFault, match="the end of every process"):
        serve.check_nothing_left(timeout_s=0.05)


@pytest.mark.parametrize(
    ("path", "name", "to_group"),
    [("disaggregated", "decode-0", False), ("mixed", "mixed-0", True)],
    ids=["parent only", "whole group"],
)
def test_ctrl_c_leaves_nothing(tiny_llama: Path, path: str, name: str, to_group: bool) -> None:
    with Serve((str(tiny_llama), *PATHS[path], *SMALL)) as serve, Front(serve.url) as front:
        body = completion(MODEL, list(range(3, 40)), 600, stream=True)
        with caught(front, body, [serve.pid_of(name)]) as stream:
            serve.note_family()
            if to_group:
                os.killpg(serve.pid, signal.SIGINT)
            else:
                serve.send_signal(signal.SIGINT)
            rest = [line for line in stream.lines if line]
        # The stream is not cut silently: it ends with an error that says why.
        assert "stopping" in rest[-1], rest[-1]
        assert serve.wait(TIMEOUT_S) == 0
        serve.check_nothing_left()
        assert "Traceback" not in serve.output


def test_a_killed_parent_takes_everything_with_it(tiny_llama: Path) -> None:
    with Serve((str(tiny_llama), *PAIR, *SMALL)) as serve:
        names = ("router", "prefill-0", "decode-0")
        pids = [serve.pid_of(name) for name in names]
        serve.send_signal(signal.SIGKILL)
        assert serve.wait(TIMEOUT_S) == -signal.SIGKILL
        serve.check_nothing_left()
        assert len(set(pids)) == 3
