"""Measures of single requests, and what is said of many."""

import io
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bench.rigs import SLO, record

from disagg.bench import estimate
from disagg.bench.figures import figures
from disagg.bench.record import Lapse, RequestRecord, read_records, write_records
from disagg.bench.slo import Slo
from disagg.core.errors import ConfigurationError


def test_measures_count_from_when_a_request_was_due() -> None:
    one = RequestRecord(
        number=0, due_s=1.0, sent_s=3.0, end_s=6.0, token_s=(4.0, 4.5, 5.5), num_prompt_tokens=9, num_output_tokens=5
    )
    assert one.ttft_s == 3.0  # not 1.0, which would hide that it was sent late
    assert one.latency_s == 4.5
    assert one.first_gap_s == 0.5
    assert one.gaps_s == (0.5, 1.0)
    assert one.tpot_s == pytest.approx(1.5 / 4)  # by the server's count of tokens
    assert one.num_unseen_tokens == 2


def test_failures_and_any_missed_target_miss() -> None:
    assert record(0).attains(SLO)
    assert not record(0, ttft_s=1.1).attains(SLO)
    assert not record(0, gap_s=0.11).attains(SLO)
    assert not record(0, lapse=Lapse.TIMEOUT).attains(SLO)
    assert record(0, num_tokens=1).attains(SLO)  # of one token there is no time per further token


def test_figures_leave_the_warm_up_out_and_name_what_failed() -> None:
    import msgspec

    records = [record(n) for n in range(10)] + [record(10, lapse=Lapse.REFUSED), record(11, ttft_s=3.0)]
    records[0] = msgspec.structs.replace(records[0], is_warm_up=True)
    found = figures(records, SLO)
    assert (found.num_requests, found.num_whole, found.lapses) == (11, 10, {"refused": 1})
    assert found.attainment.value == pytest.approx(9 / 11)
    assert (found.num_late_first, found.num_late_tokens) == (1, 0)
    assert found.duration_s == pytest.approx(11 + 3.0 + 4 * 0.05 - 1)
    assert found.goodput_per_s == pytest.approx(9 / found.duration_s)
    assert found.output_tokens_per_s == pytest.approx(50 / found.duration_s)
    assert figures(records, SLO, seed=3) == figures(records, SLO, seed=3)


def test_nothing_gives_no_numbers_and_no_error() -> None:
    found = figures([], Slo())
    assert found.num_requests == 0
    assert math.isnan(found.ttft.p50.value)
    assert found.goodput_per_s == 0


def test_records_survive_their_file(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "records.jsonl"
    records = [record(0), record(1, lapse=Lapse.BROKEN)]
    write_records(path, records)
    assert list(read_records(path.read_bytes().splitlines())) == records
    with pytest.raises(ConfigurationError, match="line 2"):
        list(read_records(io.BytesIO(path.read_bytes().splitlines()[0] + b"\n{}\n")))
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_records(path / "below", records)


# --- confidence


def test_the_interval_of_a_percentile_holds_the_truth_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(120):
        rng = random.Random(seed)
        (found,) = estimate.percentiles([(rng.expovariate(1.0),) for _ in range(150)], (0.5,), seed)
        held += found.low <= math.log(2) <= found.high
    assert 0.88 <= held / 120 <= 1.0


def test_gaps_of_one_request_do_not_count_as_independent() -> None:
    rng = random.Random(1)
    means = [rng.uniform(0.01, 0.1) for _ in range(30)]
    grouped = [[mean] * 100 for mean in means]
    single = [(value,) for group in grouped for value in group]
    (wide,) = estimate.percentiles(grouped, (0.5,), 1)
    (narrow,) = estimate.percentiles(single, (0.5,), 1)
    assert wide.value == narrow.value
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


@pytest.mark.parametrize("max_weights", [1, 100, 7000])
def test_how_many_resamples_are_made_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, max_weights: int) -> None:
    """Of millions of gaps one at a time: memory is bounded."""
    rng = random.Random(1)
    groups = [[rng.random() for _ in range(20)] for _ in range(50)]
    before = estimate.percentiles(groups, (0.5, 0.99), 1)
    monkeypatch.setattr(estimate, "_MAX_WEIGHTS", max_weights)
    assert estimate.percentiles(groups, (0.5, 0.99), 1) == before


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_one_of_the_values_and_within_its_interval(values: list[float], share: float) -> None:
    (found,) = estimate.percentiles([(value,) for value in values], (share,), 1)
    assert found.value in values
    assert sum(value <= found.value for value in values) >= share * len(values) * (1 - 1e-9)
    assert min(values) <= found.low <= found.high <= max(values)


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_share_lies_within_its_interval(good: int, num: int) -> None:
    good = min(good, num)
    found = estimate.share(good, num)
    assert 0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1
    assert found.high - found.low > 0  # few requests prove little, also when all agree
