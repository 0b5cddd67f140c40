"""Prometheus' text format: what we write, others read; what we read is what we wrote."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg.telemetry.exposition import Family, Sample, add_label, exposition, histogram_samples, labels_text
from disagg.telemetry.metrics import BLOCKS, PUSHES, REQUESTS_OPEN, STEPS, TTFT_SECONDS, Metric
from disagg.telemetry.reading import Reading, cut, read

ODD = 'a "quoted" \\ back\nslash, {x}'


def parsed(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def counted(metric: Metric, **values: float) -> Family:
    return metric, [Sample(labels_text((metric.label, value)), number) for value, number in values.items()]


def test_another_parser_reads_names_labels_and_numbers() -> None:
    families: list[Family] = [
        (REQUESTS_OPEN, [Sample("", 3)]),
        (BLOCKS, [Sample(add_label(labels_text(("worker", ODD)), "state", "free"), 1.5)]),
        (PUSHES, []),
    ]
    text = exposition(families)
    assert parsed(text) == {
        (REQUESTS_OPEN.name, frozenset()): 3,
        (BLOCKS.name, frozenset({("worker", ODD), ("state", "free")})): 1.5,
    }
    assert f"# TYPE {PUSHES.name} counter".encode() in text  # there, and nothing of it
    assert b"disagg_requests_open 3\n" in text


@pytest.mark.parametrize("value", [0, 1, True, 0.1, 1e15, 1.5e300, -2.0, math.inf, -math.inf, 123456789.0])
def test_numbers_arrive_as_they_are(value: float) -> None:
    assert parsed(exposition([(REQUESTS_OPEN, [Sample("", value)])])) == {(REQUESTS_OPEN.name, frozenset()): value}


def test_a_number_that_is_none_is_written_as_one() -> None:
    ((_, value),) = parsed(exposition([(REQUESTS_OPEN, [Sample("", math.nan)])])).items()
    assert math.isnan(value)


def test_a_histogram_counts_up_and_ends_with_everything() -> None:
    text = exposition([(TTFT_SECONDS, histogram_samples('path="local"', (0.1, 1.0), (2, 0, 5), 9.5))])
    label = ("path", "local")
    assert parsed(text) == {
        (TTFT_SECONDS.name + "_bucket", frozenset({label, ("le", "0.1")})): 2,
        (TTFT_SECONDS.name + "_bucket", frozenset({label, ("le", "1.0")})): 2,
        (TTFT_SECONDS.name + "_bucket", frozenset({label, ("le", "+Inf")})): 7,
        (TTFT_SECONDS.name + "_count", frozenset({label})): 7,
        (TTFT_SECONDS.name + "_sum", frozenset({label})): 9.5,
    }


# --- read -------------------------------------------------------------------------------------------------------


def observed(*counts: int, path: str = "local") -> list[Sample]:
    return histogram_samples(f'path="{path}"', (0.1, 1.0, 10.0), counts, 0.0)


def reading(*families: Family) -> Reading:
    text = exposition(families).decode() + "nonsense\ndisagg_requests_open many\n"
    return read(text, [metric for metric, _ in families])


def test_what_was_written_is_read_by_label() -> None:
    found = reading(
        counted(STEPS, prefill=2, decode=3),
        (BLOCKS, [Sample(labels_text(("worker", ODD), ("state", "free")), 4)]),
    )
    assert found.total(STEPS) == 5
    assert found.total(STEPS, kind="decode") == 3
    assert found.total(STEPS, kind="both") == 0
    assert found.by(BLOCKS, "worker") == {ODD: 4}
    assert found.by(BLOCKS, "worker", state="held") == {}
    assert found.total(PUSHES) == 0  # was not asked for


def test_only_what_is_asked_for_is_read() -> None:
    text = exposition([counted(STEPS, prefill=2), (PUSHES, [Sample("", 1)])]).decode()
    assert read(text, [PUSHES]).total(STEPS) == 0


def test_families_are_cut_out_as_they_stand() -> None:
    text = exposition([counted(STEPS, prefill=2), (PUSHES, [Sample("", 1)]), (REQUESTS_OPEN, [Sample("", 3)])])
    assert cut(text, [STEPS, REQUESTS_OPEN]).split(b"\n") == [
        line for line in text.split(b"\n") if line and b"pushes" not in line
    ]
    assert cut(text, [PUSHES]) == b"\n".join(line for line in text.split(b"\n") if b"pushes" in line)
    assert cut(text, [BLOCKS]) == cut(b"", [BLOCKS]) == b""
    assert read(cut(text, [STEPS]).decode(), [STEPS]).total(STEPS, kind="prefill") == 2


def test_a_rise_is_from_zero_for_what_began_anew() -> None:
    before, now = reading(counted(STEPS, prefill=10, decode=7)), reading(counted(STEPS, prefill=4, decode=9, both=1))
    risen = now.since(before)
    assert risen.by(STEPS, "kind") == {"prefill": 4, "decode": 2, "both": 1}


def test_quantiles_are_linear_within_a_bucket_and_stop_at_the_last_bound() -> None:
    found = reading((TTFT_SECONDS, [*observed(0, 10, 0, 0), *observed(10, 0, 0, 0, path="remote")]))
    assert found.quantiles(TTFT_SECONDS, (0.25, 0.5, 0.75, 1.0)) == pytest.approx([0.05, 0.1, 0.55, 1.0])
    assert reading((TTFT_SECONDS, observed(0, 0, 0, 3))).quantiles(TTFT_SECONDS, (0.5,)) == [10.0]
    assert reading((TTFT_SECONDS, observed(0, 0, 0, 0))).quantiles(TTFT_SECONDS, (0.5,)) == []
    assert reading((TTFT_SECONDS, [])).quantiles(TTFT_SECONDS, (0.5,)) == []
