"""What is asked, and when."""

import random
import statistics
from itertools import islice, pairwise

import pytest

from disagg.bench.arrivals import EvenArrivals, GammaArrivals, PoissonArrivals
from disagg.bench.workload import (
    ANSWER_LABEL,
    ClosedWork,
    Lengths,
    PrefixPool,
    RandomWork,
    Run,
    SessionWork,
    WorkRequest,
    WorkStream,
    prompt_ids,
)
from disagg.core.errors import ConfigurationError


def drain(stream: WorkStream) -> list[WorkRequest]:
    requests = []
    while (request := stream.next_request()) is not None:
        requests.append(request)
    return requests


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    between = gaps(list(islice(GammaArrivals(5.0, cv).times_s(random.Random(1)), 40_000)))
    assert statistics.mean(between) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(between) / statistics.mean(between) == pytest.approx(cv, rel=0.08)


def test_poisson_gaps_are_exponential_and_even_ones_are_even() -> None:
    between = gaps(list(islice(PoissonArrivals(4.0).times_s(random.Random(1)), 20_000)))
    assert statistics.mean(between) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(between) == pytest.approx(0.25, rel=0.05)
    assert list(islice(EvenArrivals(2.0).times_s(random.Random(0)), 3)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("arrivals", [PoissonArrivals(0), GammaArrivals(-1, 1), GammaArrivals(1, 0), EvenArrivals(0)])
def test_rates_that_cannot_be_are_refused(arrivals: PoissonArrivals) -> None:
    with pytest.raises(ConfigurationError, match="must be above 0"):
        next(iter(arrivals.times_s(random.Random(0))))


def test_prompts_share_what_their_chains_share() -> None:
    one = prompt_ids((Run(7, 4), Run(8, 3)))
    assert one == (7, 0, 0, 0, 8, 0, 0)
    assert prompt_ids((Run(7, 4), Run(9, 3)))[:4] == one[:4]
    assert prompt_ids((Run(7, 2),)) == one[:2]
    assert prompt_ids((Run(7, 1), Run(ANSWER_LABEL, 2), Run(8, 0), Run(9, 1))) == (7, ANSWER_LABEL, ANSWER_LABEL, 9)


@pytest.mark.parametrize("is_lognormal", [True, False])
def test_lengths_have_the_mean_and_spread_asked_for(is_lognormal: bool) -> None:
    lengths = Lengths(200, 80, is_lognormal=is_lognormal, least=1, most=5000)
    rng = random.Random(3)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(200, rel=0.03)
    expected = 80 if is_lognormal else 80 / 3**0.5
    assert statistics.stdev(drawn) == pytest.approx(expected, rel=0.05)
    assert Lengths(12).draw(rng) == 12
    assert {Lengths(10, 50, least=5, most=6).draw(rng) for _ in range(50)} == {5, 6}


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="mean must be above 0"):
        Lengths(0)


def random_work(num: int = 200, prefixes: PrefixPool | None = None) -> RandomWork:
    return RandomWork(
        num_requests=num,
        arrivals=PoissonArrivals(10),
        prompt=Lengths(50, 20),
        output=Lengths(10, 5),
        prefixes=prefixes or PrefixPool(),
    )


def test_the_same_seed_asks_the_same() -> None:
    work = random_work(prefixes=PrefixPool(3, 100, 0.5))
    assert drain(work.start(random.Random(5))) == drain(work.start(random.Random(5)))
    assert drain(work.start(random.Random(5))) != drain(work.start(random.Random(6)))


def test_own_parts_of_prompts_are_nobody_elses() -> None:
    requests = drain(random_work(prefixes=PrefixPool(3, 100, 0.5)).start(random.Random(5)))
    assert len({request.runs[-1].label for request in requests}) == 200
    shared = [request.runs[0] for request in requests if len(request.runs) == 2]
    assert 60 < len(shared) < 140
    assert {run.num_tokens for run in shared} == {100}
    assert len({run.label for run in shared}) == 3
    assert [request.due_s for request in requests] == sorted(request.due_s for request in requests)


def test_a_closed_loop_asks_again_when_an_answer_has_ended() -> None:
    stream = ClosedWork(random_work(10), num_clients=3, think_s=2.0).start(random.Random(0))
    first = drain(stream)
    assert [request.number for request in first] == [0, 1, 2]
    following = stream.after_end(first[1], 5.0, is_whole=False)
    assert following is not None
    assert (following.number, following.due_s) == (3, 7.0)
    later = [stream.after_end(first[0], 6.0, is_whole=True) for _ in range(8)]
    assert [request.number for request in later if request is not None] == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ConfigurationError, match="at least 1 must ask"):
        ClosedWork(random_work(10), num_clients=0).start(random.Random(0))


def sessions(**more: object) -> SessionWork:
    fields = {
        "num_sessions": 4,
        "arrivals": PoissonArrivals(1),
        "num_turns": Lengths(3),
        "message": Lengths(20, 10),
        "output": Lengths(7),
        "system": PrefixPool(1, 50),
    }
    return SessionWork(**(fields | more))  # type: ignore[arg-type]


def test_a_turn_says_again_all_that_was_said() -> None:
    stream = sessions().start(random.Random(0))
    first = drain(stream)
    assert len(first) == 4
    second = stream.after_end(first[2], 100.0, is_whole=True)
    assert second is not None
    assert second.due_s > 100.0
    said = (*prompt_ids(first[2].runs), *(ANSWER_LABEL,) * first[2].num_output_tokens)
    assert prompt_ids(second.runs)[: len(said)] == said
    assert second.num_prompt_tokens > len(said)
    third = stream.after_end(second, 200.0, is_whole=True)
    assert third is not None
    assert stream.after_end(third, 300.0, is_whole=True) is None


def test_a_session_ends_with_a_failed_turn_or_a_long_one() -> None:
    stream = sessions().start(random.Random(0))
    request = drain(stream)[0]
    assert stream.after_end(request, 1.0, is_whole=False) is None
    assert stream.after_end(request, 1.0, is_whole=True) is None
    stream = sessions(max_prompt_tokens=80).start(random.Random(0))
    request = drain(stream)[0]
    assert stream.after_end(request, 1.0, is_whole=True) is None


def test_what_a_session_says_does_not_depend_on_when_others_end() -> None:
    def second_turns(order: list[int]) -> dict[int, tuple[Run, ...]]:
        stream = sessions().start(random.Random(0))
        first = drain(stream)
        turns = [stream.after_end(first[index], float(at), is_whole=True) for at, index in enumerate(order)]
        return {turn.session: turn.runs for turn in turns if turn is not None}

    assert second_turns([0, 1, 2, 3]) == second_turns([3, 1, 0, 2])


def test_clients_of_a_closed_loop_begin_a_session_when_their_last_one_has_ended() -> None:
    stream = sessions(num_clients=2, num_turns=Lengths(2), think_s=0.0).start(random.Random(0))
    first = drain(stream)
    assert [(request.session, request.due_s) for request in first] == [(0, 0.0), (1, 0.0)]
    second = stream.after_end(first[1], 5.0, is_whole=True)
    assert second is not None
    assert (second.session, second.due_s) == (1, 5.0)
    third = stream.after_end(second, 9.0, is_whole=True)  # its last turn
    assert third is not None
    assert (third.session, third.due_s) == (2, 9.0)
    after_failure = stream.after_end(first[0], 10.0, is_whole=False)
    assert after_failure is not None
    assert after_failure.session == 3
    assert stream.after_end(third, 11.0, is_whole=False) is None  # four have begun
    assert drain(stream) == []


def test_closed_and_open_sessions_say_the_same() -> None:
    opened = drain(sessions().start(random.Random(7)))
    closed = drain(sessions(num_clients=4).start(random.Random(7)))
    assert [request.runs for request in closed] == [request.runs for request in opened]


def test_a_session_whose_first_message_is_too_long_does_not_end_the_others() -> None:
    lengths = Lengths(200, 190)
    short = sessions(num_sessions=40, message=lengths, max_prompt_tokens=250)
    requests = drain(short.start(random.Random(0)))
    assert 10 < len(requests) < 40
    assert all(request.num_prompt_tokens <= 250 for request in requests)
    assert [request.number for request in requests] == list(range(len(requests)))


@pytest.mark.parametrize("pool", [{"num_prefixes": -1}, {"num_tokens": -1}, {"share": 1.5}, {"share": float("nan")}])
def test_prefixes_that_cannot_be_are_refused(pool: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="the share from 0 to 1"):
        PrefixPool(**pool)  # type: ignore[arg-type]
