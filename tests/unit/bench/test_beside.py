"""Two closed loops at once."""

import random

import pytest

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.beside import BesideWork, in_turns, is_neighbour
from disagg.bench.workload import ClosedWork, Lengths, RandomWork, WorkRequest


def loop(num_clients: int, num_requests: int, prompt: int) -> ClosedWork:
    arrivals = EvenArrivals(1.0)
    work = RandomWork(num_requests=num_requests, arrivals=arrivals, prompt=Lengths(prompt), output=Lengths(3))
    return ClosedWork(work, num_clients)


def play(work: BesideWork) -> list[WorkRequest]:
    """All requests, each ended before the next begins."""
    stream = work.start(random.Random(1))
    open_requests: list[WorkRequest] = []
    while (request := stream.next_request()) is not None:
        open_requests.append(request)
    asked = list(open_requests)
    now_s = 0.0
    while open_requests:
        now_s += 1.0
        following = stream.after_end(open_requests.pop(0), now_s, is_whole=True)
        if following is not None:
            open_requests.append(following)
            asked.append(following)
    return asked


def test_the_neighbour_goes_on_until_the_work_has_ended() -> None:
    asked = play(BesideWork(loop(2, 5, 7), loop(1, 1000, 40)))
    work = [request for request in asked if not is_neighbour(request.number)]
    beside = [request for request in asked if is_neighbour(request.number)]
    assert [request.number for request in work] == [0, 2, 4, 6, 8]
    assert {request.num_prompt_tokens for request in work} == {7}
    assert 1 < len(beside) < 6
    assert {request.num_prompt_tokens for request in beside} == {40}


def test_no_two_prompts_share_a_label_or_a_number() -> None:
    asked = play(BesideWork(loop(3, 9, 7), loop(2, 1000, 40)))
    for values in ([request.number for request in asked], [request.runs[0].label for request in asked]):
        assert len(set(values)) == len(asked)


def test_spans_in_a_neighbours_turns_and_in_its_pauses_are_told_apart() -> None:
    busy, near = [(2.0, 4.0)], [(1.5, 4.5)]
    spans = [(0.0, 1.0), (1.0, 1.6), (2.0, 2.5), (3.5, 4.2), (4.5, 4.6), (1.0, 5.0)]
    found = in_turns(spans, busy, near)
    assert found.alone_s == [1.0, pytest.approx(0.1)]
    assert found.beside_s == [0.5]
