"""Workers that die or fall silent, as real processes.

The client gets an explicit error: an HTTP status before the first byte, an error event after it. The survivor gets its
blocks back, the supervisor brings the worker back (or it comes back by itself), and the next request is served.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.e2e.cluster import Answer, Front, completion

from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

MODEL = "tiny-llama"
BEAT_TIMEOUT_S = 3.0
# One prompt token a step: a prompt of 600 takes long enough to be interrupted.
ARGUMENTS = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--chunk-tokens", "1")
BEATS = ("--beat-interval-s", "0.1", "--beat-timeout-s", str(BEAT_TIMEOUT_S))
SIZES = ("--kv-memory", "8M", "--num-threads", "1")
LONG_PROMPT = [3 + index % 300 for index in range(600)]
SHORT_PROMPT = [7, 8, 9, 10]
# Far below what a lease or a whole answer would take: whoever waits longer hangs.
ERROR_TIMEOUT_S = 15.0
DECODE_BLOCKS = ("held", "reserved", "quarantined")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    with Serve((str(tiny_llama), *ARGUMENTS, *BEATS, *SIZES)) as running:
        yield running


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    serve.wait_healthy()
    with Front(serve.url, timeout_s=ERROR_TIMEOUT_S) as front:
        front.wait_idle(2)
        yield front


@pytest.fixture
def expected(front: Front) -> Answer:
    """What the cluster answers when nothing goes wrong."""
    return front.complete(MODEL, SHORT_PROMPT, 8)[0]


@contextmanager
def asked_in_background(front: Front, max_tokens: int) -> Iterator["Future[httpx.Response]"]:
    """A long prompt under way: its prefill has begun and not ended."""
    before = front.readings().total(table.PROMPT_TOKENS_COMPUTED, role="prefill")
    # Another start for each request, or the prefix index would know it.
    prompt = [3 + (before + index) % 300 for index in range(len(LONG_PROMPT))]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(front.post, completion(MODEL, prompt, max_tokens))

        def is_under_way() -> bool:
            assert not answer.done(), "it ended before it could be interrupted"
            return front.readings().total(table.PROMPT_TOKENS_COMPUTED, role="prefill") > before

        wait_until(is_under_way, ERROR_TIMEOUT_S, "the prefill to begin")
        yield answer


def error_event(lines: Iterator[str]) -> str:
    """The last event of a stream that broke: an error, and no [DONE]."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert "[DONE]" not in events
    message = json.loads(events[-1])["error"]["message"]
    assert isinstance(message, str)
    return message


def check_recovered(serve: Serve, front: Front, expected: Answer) -> None:
    """Healthy again, nothing held, and the next answer is what it always was, handed over as always."""
    serve.wait_healthy()
    front.wait_idle(2)
    before = front.readings().total(table.HANDOFFS, outcome="received")
    assert front.complete(MODEL, SHORT_PROMPT, 8)[0] == expected
    wait_until(
        lambda: front.readings().total(table.HANDOFFS, outcome="received") == before + 1,
        ERROR_TIMEOUT_S,
        "the hand-off",
    )
    front.wait_idle(2)


def test_a_prefill_worker_killed_mid_prompt(serve: Serve, front: Front, expected: Answer) -> None:
    with asked_in_background(front, 8) as answer:
        old_pid = serve.kill("prefill-0", signal.SIGKILL)
        response = answer.result(ERROR_TIMEOUT_S)
    assert response.status_code == httpx.codes.BAD_GATEWAY, response.text
    assert "prefill-0" in response.json()["error"]["message"]
    # The survivor has let go before anybody came back.
    wait_until(
        lambda: not any(front.readings().total(table.BLOCKS, role="decode", state=state) for state in DECODE_BLOCKS),
        ERROR_TIMEOUT_S,
        "the decode worker's blocks to be free or cached",
    )
    serve.wait_restarted("prefill-0", old_pid)
    check_recovered(serve, front, expected)


def test_a_decode_worker_killed_mid_stream(serve: Serve, front: Front, expected: Answer) -> None:
    body = completion(MODEL, SHORT_PROMPT, 600, stream=True)
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert all("error" not in next(lines) for _ in range(6))
        old_pid = serve.kill("decode-0", signal.SIGKILL)
        message = error_event(lines)
    assert "decode-0" in message
    serve.wait_restarted("decode-0", old_pid)
    check_recovered(serve, front, expected)


def test_a_decode_worker_killed_while_it_receives(serve: Serve, front: Front, expected: Answer) -> None:
    with asked_in_background(front, 8) as answer:
        old_pid = serve.kill("decode-0", signal.SIGKILL)
        response = answer.result(ERROR_TIMEOUT_S)
    assert response.status_code == httpx.codes.BAD_GATEWAY, response.text
    assert "decode-0" in response.json()["error"]["message"]
    wait_until(
        lambda: not any(front.readings().total(table.BLOCKS, role="prefill", state=state) for state in DECODE_BLOCKS),
        ERROR_TIMEOUT_S,
        "the prefill worker's blocks to be free or cached",
    )
    serve.wait_restarted("decode-0", old_pid)
    check_recovered(serve, front, expected)


@contextmanager
def frozen(serve: Serve, name: str) -> Iterator[int]:
    """A process that stops without a word; it goes on at the end."""
    pid = serve.kill(name, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_decode_worker_silent_mid_stream(serve: Serve, front: Front, expected: Answer) -> None:
    body = completion(MODEL, SHORT_PROMPT, 600, stream=True)
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert all("error" not in next(lines) for _ in range(6))
        with frozen(serve, "decode-0") as pid:
            message = error_event(lines)
            health = front.health()
    assert "decode-0" in message
    assert "silent" in message
    assert health.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "no decode worker has registered" in health.json()["missing"]
    # It has lost nothing but its connections: it comes back as the same process.
    check_recovered(serve, front, expected)
    assert serve.pid_of("decode-0") == pid


def test_a_prefill_worker_silent_mid_prompt(serve: Serve, front: Front, expected: Answer) -> None:
    with asked_in_background(front, 8) as answer, frozen(serve, "prefill-0") as pid:
        response = answer.result(ERROR_TIMEOUT_S)
    assert response.status_code == httpx.codes.BAD_GATEWAY, response.text
    assert "prefill-0" in response.json()["error"]["message"]
    check_recovered(serve, front, expected)
    assert serve.pid_of("prefill-0") == pid


def test_a_router_killed_mid_stream(serve: Serve, front: Front, expected: Answer) -> None:
    """The supervisor brings it back where it was; the workers drop what it asked for."""
    body = completion(MODEL, SHORT_PROMPT, 600, stream=True)
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        old_pid = serve.kill("router", signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    serve.wait_restarted("router", old_pid)
    check_recovered(serve, front, expected)


def test_no_traceback_was_written(serve: Serve) -> None:
    """Runs last: a loss is expected everywhere, never a fault of ours."""
    assert "Traceback" not in serve.output, serve.output
