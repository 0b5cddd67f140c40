"""Traffic as a list: what is cached, windows, rates."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner import rigs

from disagg.bench.traces import TraceWork
from disagg.bench.workload import WorkRequest
from disagg.core.errors import ConfigurationError
from disagg.planner.traffic import ListedWork, Traffic, read_traffic

TRAFFIC = rigs.traffic()


def played(work: ListedWork) -> list[WorkRequest]:
    stream = work.start(random.Random(0))
    return list(iter(stream.next_request, None))


def mooncake(tmp_path: Path, *chains: tuple[int, ...]) -> Traffic:
    rows = (
        f'{{"timestamp": {1000 * number}, "input_length": {512 * len(ids)}, "output_length": 5, "hash_ids": {[*ids]}}}'
        for number, ids in enumerate(chains)
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    return read_traffic("trace", TraceWork(path=path, format="mooncake"), 0)


def test_only_a_chain_that_began_alike_is_cached(tmp_path: Path) -> None:
    found = mooncake(tmp_path, (1, 2, 3), (1, 2, 4), (2, 3), (1, 2, 4))
    assert found.uncached == (1536, 512, 1024, 1)
    assert found.rate_per_s == pytest.approx(1.0)


@given(st.integers(2, 500), st.floats(0.1, 100))
def test_a_window_has_the_asked_number_and_rate(num: int, rate: float) -> None:
    requests = played(TRAFFIC.window(num, rate))
    assert len(requests) == num
    assert requests[0].due_s == 0
    assert (num - 1) / requests[-1].due_s == pytest.approx(rate, rel=1e-6)
    assert [each.number for each in requests] == list(range(num))


def test_a_window_is_the_part_whose_load_is_nearest_to_the_whole(tmp_path: Path) -> None:
    """A quiet half and a busy half: neither end stands for the whole."""
    path = tmp_path / "trace.csv"
    times = [2.0 * index for index in range(50)] + [100 + 0.5 * index for index in range(200)]
    rows = [f"2023-11-16 18:{int(each // 60):02}:{each % 60:09.6f},100,10" for each in times]
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    found = read_traffic("trace", TraceWork(path=path, format="azure"), 0)
    begin = played(found.window(40, found.rate_per_s))[0]
    first = next(each for each in found.requests if each.runs == begin.runs)
    assert 0 < first.due_s < 100  # from the quiet half into the busy one


def test_samples_stand_for_all() -> None:
    samples = TRAFFIC.samples
    mean = sum(prompt for prompt, _, _ in samples) / len(samples)
    assert mean == pytest.approx(TRAFFIC.mean_prompt, rel=0.05)


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1 requests"):
        mooncake(tmp_path, (1,))


def test_requests_that_a_coarse_clock_put_together_are_spread_over_its_tick(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    counts = (4, 2, 4, 2)
    rows = [(3000 * tick, 100 + number) for tick, count in enumerate(counts) for number in range(count)]
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 5, "hash_ids": [{}]}}'
    path.write_text("\n".join(line.format(at_ms, length, place) for place, (at_ms, length) in enumerate(rows)))
    found = read_traffic("ticks", TraceWork(path=path, format="mooncake"), 0)
    assert [request.due_s for request in found.requests] == [
        *(0.0, 0.75, 1.5, 2.25, 3.0, 4.5),
        *(6.0, 6.75, 7.5, 8.25, 9.0, 10.5),
    ]
    assert [request.num_prompt_tokens for request in found.requests] == [length for _, length in rows]
    assert "tick of 3 s" in found.name


def test_times_that_some_requests_share_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "fine.csv"
    rows = [f"{at_s},{100},{5}" for at_s in (0, 1, 1, 2, 3, 4)]
    path.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]))
    found = read_traffic("fine", TraceWork(path=path, format="burstgpt"), 0)
    assert [request.due_s for request in found.requests] == [0, 1, 1, 2, 3, 4]
    assert found.name == "fine"
