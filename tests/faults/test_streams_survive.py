"""Workers that die, hang or are told to end, as real processes, while somebody reads: the answer is whole and the same.

Two prefill and two decode workers. An undisturbed answer is the reference; the same question is asked again while a
process dies. Only ids, times and what was found cached may differ.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.cluster import Front, completion

from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

MODEL = "tiny-llama"
NUM_WORKERS = 4
# A few prompt tokens a step: a prompt of 600 takes long enough to be interrupted.
ARGUMENTS = ("--prefill", "2", "--decode", "2", "--local-prefill-tokens", "0", "--chunk-tokens", "4")
BEATS = ("--beat-interval-s", "1.5", "--drain-timeout-s", "20")
# Deaths are the point here: nobody is given up for dying often.
DEATHS = ("--max-crashes", "1000", "--max-restart-delay-s", "0.3")
SIZES = ("--kv-memory", "8M", "--num-threads", "1")
TIMEOUT_S = 60.0
LONG_PROMPT = [3 + index % 300 for index in range(600)]
SHORT_PROMPT = [7, 8, 9, 10, 11]
LENGTH = 480  # tokens: long enough to be interrupted at 17
pytestmark = pytest.mark.timeout(600)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "two choices": {"temperature": 0.8, "seed": 7, "n": 2},
    "stop string": {"temperature": 0, "stop": ["never said of anybody"]},
}


@pytest.fixture(scope="module")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    with Serve((str(tiny_llama), *ARGUMENTS, *BEATS, *DEATHS, *SIZES)) as running:
        yield running


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    serve.wait_healthy()
    with Front(serve.url, timeout_s=TIMEOUT_S) as front:
        front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
        yield front


def question(prompt: list[int], mode: str, *, stream: bool, max_tokens: int = LENGTH) -> dict[str, Any]:
    more = {"ignore_eos": True, **MODES[mode]}
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    return completion(MODEL, prompt, max_tokens, **more)


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """What must be equal."""
    assert "error" not in body, body
    usage = body.get("usage")
    kept = {"choices": body["choices"], "model": body["model"], "object": body["object"]}
    if usage:
        kept["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return kept


def read(front: Front, body: dict[str, Any], after: int = -1, act: Callable[[], None] = lambda: None) -> list[Any]:
    """All of an answer; `act` is called once the stream has given `after` pieces."""
    if not body.get("stream"):
        response = front.post(body)
        assert response.status_code == httpx.codes.OK, response.text
        return [without_ids(response.json())]
    pieces: list[Any] = []
    ids: set[str] = set()
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                assert len(ids) == 1
                return _by_choice(pieces)
            if line:
                event = json.loads(line.removeprefix("data: "))
                pieces.append(without_ids(event))
                ids.add(event["id"])
            if line and len(pieces) == after:
                act()
    raise AssertionError(f"the stream ended without [DONE]: {pieces[-1:]}")


def _by_choice(pieces: list[Any]) -> list[Any]:
    """Choices of one stream come in any order among each other; each by itself is in order."""
    return sorted(pieces, key=lambda piece: piece["choices"][0]["index"] if piece["choices"] else 99)


def writer(front: Front) -> str:
    """The decode worker that is at work."""
    found: list[str] = []

    def is_known() -> bool:
        workers = front.cluster().workers
        found[:] = [w.worker_id for w in workers if w.role == "decode" and w.state.num_running]
        return bool(found)

    wait_until(is_known, TIMEOUT_S, "a decode worker at work")
    return found[0]


def kill_writer(serve: Serve, front: Front) -> None:
    with Front(front.url) as other:
        serve.kill(writer(other), signal.SIGKILL)


@pytest.mark.parametrize(
    ("mode", "after"), [("greedy", 1), ("seeded", 17), ("two choices", 17), ("stop string", LENGTH - 2)]
)
def test_a_decode_worker_killed_mid_stream(serve: Serve, front: Front, mode: str, after: int) -> None:
    body = question(SHORT_PROMPT, mode, stream=True)
    expected = read(front, body)
    moves = front.readings().total(table.MOVES)
    assert read(front, body, after, lambda: kill_writer(serve, front)) == expected
    # Near the end the last tokens may have left the worker before it died.
    assert front.readings().total(table.MOVES) > moves or after > LENGTH - 10


def test_a_decode_worker_killed_under_an_answer_that_is_not_streamed(serve: Serve, front: Front) -> None:
    body = question(SHORT_PROMPT, "seeded", stream=False, max_tokens=500)
    expected = read(front, body)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(read, front, body)
        kill_writer(serve, front)
        assert answer.result(TIMEOUT_S) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "after"), [(True, 0), (True, 1), (True, 17), (True, LENGTH - 1), (False, 0), (False, 17)]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_decode_worker_killed_at_any_moment(
    serve: Serve, front: Front, mode: str, after: int, *, stream: bool
) -> None:
    """After 0 tokens: while the prompt is read or handed over. An answer that is not streamed shows no other moment."""
    body = question(SHORT_PROMPT, mode, stream=stream)
    expected = read(front, body)
    if stream and after:
        assert read(front, body, after, lambda: kill_writer(serve, front)) == expected
        return
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(read, front, body)
        if not after:
            serve.kill("decode-0", signal.SIGKILL)  # whether it was to write this or not
        else:
            kill_writer(serve, front)
        assert answer.result(TIMEOUT_S) == expected


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_prefill_worker_killed_at_any_moment_of_its_work(serve: Serve, front: Front, share: float) -> None:
    """From the first chunk to the last push."""
    body = question(long_prompt(100 + round(10 * share)), "seeded", stream=True, max_tokens=12)
    with prefill_under_way(front, body) as (answer, name):
        before = front.readings().total(table.PROMPT_TOKENS_COMPUTED, worker=name)
        wanted = before + share * len(LONG_PROMPT)

        def is_that_far() -> bool:
            return answer.done() or front.readings().total(table.PROMPT_TOKENS_COMPUTED, worker=name) >= wanted

        wait_until(is_that_far, TIMEOUT_S, "the moment to strike")
        serve.kill(name, signal.SIGKILL)
        disturbed = answer.result(TIMEOUT_S)
    serve.wait_healthy()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
    assert disturbed == read(front, body)


@contextmanager
def prefill_under_way(front: Front, body: dict[str, Any]) -> Iterator[tuple["Future[list[Any]]", str]]:
    """A long prompt whose prefill has begun and not ended, and the worker that reads it."""

    def computed() -> dict[str, int]:
        readings = front.readings()
        names = ("prefill-0", "prefill-1")
        return {name: readings.total(table.PROMPT_TOKENS_COMPUTED, worker=name) for name in names}

    before = computed()
    with Front(front.url, timeout_s=TIMEOUT_S) as other, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(read, other, body)
        busy: list[str] = []

        def is_under_way() -> bool:
            assert not answer.done(), "it ended before it could be interrupted"
            busy[:] = [name for name, count in computed().items() if count > before[name]]
            return bool(busy)

        wait_until(is_under_way, TIMEOUT_S, "the prefill to begin")
        yield answer, busy[0]


def long_prompt(salt: int) -> list[int]:
    """Another start for each, or the prefix index would know it."""
    return [3 + salt, *LONG_PROMPT]


@pytest.mark.parametrize("salt", [1, 2])
def test_a_prefill_worker_killed_mid_prompt(serve: Serve, front: Front, salt: int) -> None:
    body = question(long_prompt(salt), "seeded", stream=True, max_tokens=12)
    with prefill_under_way(front, body) as (answer, name):
        serve.kill(name, signal.SIGKILL)
        disturbed = answer.result(TIMEOUT_S)
    serve.wait_healthy()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
    assert disturbed == read(front, body)


def test_a_prefill_worker_silent_mid_prompt(serve: Serve, front: Front) -> None:
    body = question(long_prompt(3), "greedy", stream=True, max_tokens=12)
    with prefill_under_way(front, body) as (answer, name), frozen(serve, name) as pid:
        disturbed = answer.result(TIMEOUT_S)
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
    assert serve.pid_of(name) == pid  # it has lost nothing but its connections
    assert disturbed == read(front, body)


@contextmanager
def frozen(serve: Serve, name: str) -> Iterator[int]:
    """A process that stops without a word; it goes on at the end."""
    pid = serve.kill(name, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_decode_worker_silent_mid_stream(serve: Serve, front: Front) -> None:
    body = question(SHORT_PROMPT, "two choices", stream=True)
    expected = read(front, body)
    stopped: list[int] = []

    def stop_writer() -> None:
        with Front(front.url) as other:
            stopped.append(serve.kill(writer(other), signal.SIGSTOP))

    try:
        assert read(front, body, 9, stop_writer) == expected
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)


def test_a_router_killed_mid_stream_breaks_the_connection(serve: Serve, front: Front) -> None:
    """Never a short answer that looks whole; the workers drop what it asked for and serve the next router."""
    body = question(SHORT_PROMPT, "greedy", stream=True, max_tokens=600)
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        old_pid = serve.kill("router", signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    serve.wait_restarted("router", old_pid)
    serve.wait_healthy()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)


def test_every_worker_restarted_in_turn_under_load(serve: Serve, front: Front) -> None:
    """No error, no truncated answer."""
    body = question(SHORT_PROMPT, "seeded", stream=True)
    expected = read(front, body)
    old_pids = {worker.worker_id: serve.pid_of(worker.worker_id) for worker in front.cluster().workers}
    assert len(old_pids) == NUM_WORKERS
    serve.send_signal(signal.SIGUSR1)

    def is_done() -> bool:
        try:
            return all(serve.pid_of(name) != pid for name, pid in old_pids.items())
        except InternalFault:
            return False  # one is between two lives

    def ask_until_done() -> int:
        with Front(front.url, timeout_s=TIMEOUT_S) as own:
            for count in range(1, 10_000):
                assert read(own, body) == expected
                if is_done():
                    return count
        raise AssertionError("the restarts did not end")

    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask_until_done) for _ in range(2)]
        assert all(answer.result(300.0) > 3 for answer in answers)
    serve.note_family()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)


def test_no_traceback_was_written(serve: Serve) -> None:
    """Runs last but one: a loss is expected everywhere, never a fault of ours."""
    assert "Traceback" not in serve.output, serve.output


def test_a_drained_worker_ends_for_good_and_nothing_is_lost(serve: Serve, front: Front) -> None:
    """Runs last: the worker that drains is not started again."""
    body = question(SHORT_PROMPT, "seeded", stream=True)
    expected = read(front, body)
    drained: list[str] = []

    def drain_writer() -> None:
        with Front(front.url) as other:
            drained.append(writer(other))
        os.kill(serve.pid_of(drained[0]), signal.SIGTERM)

    assert read(front, body, 9, drain_writer) == expected
    wait_until(lambda: drained[0] not in " ".join(serve.family().values()), TIMEOUT_S, "the drained worker's end")
    front.wait_idle(NUM_WORKERS - 1, timeout_s=TIMEOUT_S)
    assert read(front, body) == expected
