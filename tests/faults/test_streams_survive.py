"""Workers that die, hang or are told to end, as real processes, while somebody reads: the answer is whole and the same.

Two prefill and two decode workers. An undisturbed answer is the reference; the same question is asked again while a
worker is struck (tests/faults/strikes.py). Only ids, times and what was found cached may differ.
"""

import itertools
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.e2e.cluster import Front, caught, completion
from tests.faults.strikes import WRITING, Act, act_once_open, aim_at, reading, strike_until_moved
from tests.faults.survival import MODEL, NUM_WORKERS, TIMEOUT_S

from disagg.core.errors import InternalFault
from disagg.testing.processes import Serve, wait_until

LONG_PROMPT = [3 + index % 300 for index in range(600)]
SHORT_PROMPT = [7, 8, 9, 10, 11]
SALTS = itertools.count()  # another start for each long prompt, or the prefix index would know it
LENGTH = 480  # tokens: most of them are still to come when a worker is struck
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("mortals")]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "two choices": {"temperature": 0.8, "seed": 7, "n": 2},
    "stop string": {"temperature": 0, "stop": ["never said of anybody"]},
    "every parameter": {
        "temperature": 0.9,
        "seed": 7,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.001,
        "min_tokens": 20,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "9": 2},
        "logprobs": 2,
        "echo": True,
    },
}


@pytest.fixture
def serve(mortals: Serve) -> Serve:
    return mortals


@pytest.fixture
def front(mortals_front: Front) -> Front:
    return mortals_front


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


def kill_mid_stream(serve: Serve, front: Front, body: dict[str, Any], after: int) -> None:
    """The decode worker at work dies when so many pieces are here; the answer is that of an undisturbed cluster."""
    expected = read(front, body)
    _, answers = strike_until_moved(serve, front, WRITING, signal.SIGKILL, lambda act: read(front, body, after, act))
    assert all(answer == expected for answer in answers)


def kill_near_the_end(serve: Serve, front: Front, body: dict[str, Any], after: int) -> None:
    """The last tokens may have left the worker before it dies."""
    expected = read(front, body)
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
    aim = aim_at(serve, front, WRITING)
    assert read(front, body, after, lambda: aim.strike(signal.SIGKILL)) == expected


def kill_under_a_whole_answer(serve: Serve, front: Front, body: dict[str, Any]) -> None:
    expected = read(front, body)

    def ask(act: Act) -> list[Any]:
        return act_once_open(front, lambda other: read(other, body), act)

    _, answers = strike_until_moved(serve, front, WRITING, signal.SIGKILL, ask)
    assert all(answer == expected for answer in answers)


@pytest.mark.parametrize(("mode", "after"), [("greedy", 1), ("seeded", 8), ("two choices", 4), ("every parameter", 6)])
def test_a_decode_worker_killed_mid_stream(serve: Serve, front: Front, mode: str, after: int) -> None:
    kill_mid_stream(serve, front, question(SHORT_PROMPT, mode, stream=True), after)


def test_a_decode_worker_killed_near_the_end_of_a_stream(serve: Serve, front: Front) -> None:
    kill_near_the_end(serve, front, question(SHORT_PROMPT, "stop string", stream=True), LENGTH - 2)


def test_a_decode_worker_killed_under_an_answer_that_is_not_streamed(serve: Serve, front: Front) -> None:
    kill_under_a_whole_answer(serve, front, question(SHORT_PROMPT, "seeded", stream=False))


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
    if not after:
        expected = read(front, body)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(read, front, body)
            serve.kill("decode-0", signal.SIGKILL)  # whether it was to write this or not
            assert answer.result(TIMEOUT_S) == expected
    elif not stream:
        kill_under_a_whole_answer(serve, front, body)
    elif after < LENGTH - 10:
        kill_mid_stream(serve, front, body, after)
    else:
        kill_near_the_end(serve, front, body, after)


def strike_a_prefill(serve: Serve, front: Front, mode: str, number: int, share: float = 0.0) -> str:
    """In the middle of a prompt that nobody knows yet; the name of the worker that was reading it."""
    bodies: list[dict[str, Any]] = []

    def ask(act: Act) -> list[Any]:
        bodies.append(question([3 + next(SALTS), *LONG_PROMPT], mode, stream=True, max_tokens=12))
        return act_once_open(front, lambda other: read(other, bodies[-1]), act)

    name, answers = strike_until_moved(serve, front, reading(len(LONG_PROMPT), share), number, ask)
    serve.wait_healthy()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
    for body, answer in zip(bodies, answers, strict=True):
        assert answer == read(front, body)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_prefill_worker_killed_at_any_moment_of_its_work(serve: Serve, front: Front, share: float) -> None:
    """From the first chunk to the last push."""
    strike_a_prefill(serve, front, "seeded", signal.SIGKILL, share)


@pytest.mark.parametrize("mode", ["seeded", "greedy"])
def test_a_prefill_worker_killed_mid_prompt(serve: Serve, front: Front, mode: str) -> None:
    strike_a_prefill(serve, front, mode, signal.SIGKILL)


def test_a_prefill_worker_silent_mid_prompt(serve: Serve, front: Front) -> None:
    """It has lost nothing but its connections."""
    old_pids = {name: serve.pid_of(name) for name in ("prefill-0", "prefill-1")}
    name = strike_a_prefill(serve, front, "greedy", signal.SIGSTOP)
    assert serve.pid_of(name) == old_pids[name]


def test_a_decode_worker_silent_mid_stream(serve: Serve, front: Front) -> None:
    body = question(SHORT_PROMPT, "two choices", stream=True)
    expected = read(front, body)
    _, answers = strike_until_moved(serve, front, WRITING, signal.SIGSTOP, lambda act: read(front, body, 5, act))
    assert all(answer == expected for answer in answers)
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)


def test_a_router_killed_mid_stream_breaks_the_connection(serve: Serve, front: Front) -> None:
    """Never a short answer that looks whole; the workers drop what it asked for and serve the next router."""
    body = question(SHORT_PROMPT, "greedy", stream=True, max_tokens=600)
    writers = [serve.pid_of(name) for name in ("decode-0", "decode-1")]
    with caught(front, body, writers) as stream:
        old_pid = serve.kill("router", signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(stream.lines)
    serve.wait_restarted("router", old_pid)
    serve.wait_healthy()
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)


@pytest.mark.slow
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
    name, answers = strike_until_moved(serve, front, WRITING, signal.SIGTERM, lambda act: read(front, body, 4, act))
    assert all(answer == expected for answer in answers)
    wait_until(lambda: name not in " ".join(serve.family().values()), TIMEOUT_S, "the drained worker's end")
    front.wait_idle(NUM_WORKERS - 1, timeout_s=TIMEOUT_S)
    assert read(front, body) == expected
