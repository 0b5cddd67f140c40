"""Ends that are no whole answers, along every path: cut off, turned away, left by their clients.

Case 32, a router that ends in the middle: test_structured.py, for it ends the cluster.
Case 40, a prompt that only the decode worker could hold, needs unlike workers: e4 in
tests/faults/test_class_e_real_answers.py.
Case 41, a prefill worker that fails: a2 and a3 in tests/faults/test_class_a_hangs.py.
Case 45 with four hundred at once: test_aborts.py.
"""

import asyncio
import random
from contextlib import ExitStack, suppress

import httpx
import pytest
from tests.e2e.api_paths import MAX_OPEN, PATHS, Paths, Reply, completion
from tests.e2e.test_aborts import SEED, draw, live_all

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("long paths")]
NUM_LEAVING = 12
LEAVE_EVERY_S = 0.004
NUM_AT_ONCE_AND_GONE = 90
NUM_AT_ONCE = 8  # with those who have gone before the router has looked, fewer than it lets in
PROMPT = "the quick brown fox jumps over"
LONG = [3 + place % 290 for place in range(400)]


@pytest.fixture
def paths(long_paths: Paths) -> Paths:
    return long_paths


def wait_idle(paths: Paths) -> None:
    for name, front in paths.fronts.items():
        front.wait_idle(1 if name == "mixed" else 2)


def test_case_33_one_too_many_is_turned_away_with_a_body_and_a_time(paths: Paths) -> None:
    """Path by path: what is open must still be open when one more is asked for."""
    told: list[list[Reply]] = []
    for front in paths.fronts.values():
        reading = []  # or the connections would be closed with their iterators
        with ExitStack() as stack:
            asked = completion(PROMPT, max_tokens=2500, stream=True)
            for _ in range(MAX_OPEN):
                got = stack.enter_context(front.client.stream("POST", "/v1/completions", json=asked))
                reading.append(got.iter_lines())
                next(reading[-1])
            alone = Paths({"mixed": front})
            told.append([alone.post(completion(PROMPT, **more)) for more in ({}, {"stream": True})])
            assert int(front.post(completion(PROMPT)).headers["retry-after"]) >= 1
    for replies in told:
        assert replies == told[0]
    for reply in told[0]:
        assert (reply.status, reply.error["type"]) == (429, "server_overloaded")
        assert f"the limit is {MAX_OPEN}" in reply.error["message"]
    wait_idle(paths)
    assert paths.complete(PROMPT).status == httpx.codes.OK


def test_cases_27_42_clients_that_go_at_any_moment_leave_nothing(paths: Paths) -> None:
    """Before the prompt is read, while it is handed over, after it: no lease has to end first."""
    for front in paths.fronts.values():
        for number in range(NUM_LEAVING):
            with suppress(httpx.TimeoutException):
                asked = completion([*LONG, 3 + number], max_tokens=2000)
                front.client.post(
                    "/v1/completions", json=asked, timeout=httpx.Timeout(5.0, read=(number + 1) * LEAVE_EVERY_S)
                )
    wait_idle(paths)
    unread = LONG[::-1]  # how much was read of theirs before they went is chance
    assert paths.complete(unread).status == httpx.codes.OK


def test_case_45_many_at_once_of_whom_many_go_leave_nothing_and_spoil_no_answer(paths: Paths) -> None:
    chance = random.Random(SEED)
    scripts = [draw(chance) for _ in range(NUM_AT_ONCE_AND_GONE)]
    answers = {name: asyncio.run(live_all(front.url, scripts, NUM_AT_ONCE)) for name, front in paths.fronts.items()}
    wait_idle(paths)
    whole = 0
    for found in zip(*answers.values(), strict=True):
        kept = [answer for answer in found if answer is not None]
        assert all(answer == kept[0] for answer in kept)
        whole += len(kept) == len(PATHS)
    assert NUM_AT_ONCE_AND_GONE // 5 < whole < NUM_AT_ONCE_AND_GONE
