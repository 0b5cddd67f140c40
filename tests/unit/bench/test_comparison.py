"""Who wins, from which prompt length on, and what limits: also when mixed workers win or nothing is shown."""

import re
import xml.etree.ElementTree as ET

import msgspec
from tests.unit.bench.rigs import noisy, record, result

from disagg.bench.comparison import break_even, length_classes, limiting_stage, verdict
from disagg.bench.html_report import (
    attainment_plot,
    latency_section,
    length_section,
    request_section,
    summary_section,
    trial_of,
    worker_section,
)
from disagg.bench.measure import merge
from disagg.bench.record import Lapse
from disagg.bench.text_report import describe
from disagg.report.page import page

BUSY = {"prefill": 0.4, "decode": 0.92}


def test_separate_wins_by_attainment() -> None:
    found = verdict("chat", result("mixed", noisy(0.9, 0.13)), result("separate", noisy(0.9, 0.05), BUSY))
    assert found.winner == "separate"
    assert "separate workers win" in found.sentence
    assert "decode (computing 92 % of the time; prefill 40 %)" in found.sentence


def test_mixed_wins_and_it_is_said() -> None:
    found = verdict("chat", result("mixed", noisy(0.4, 0.05)), result("separate", noisy(0.8, 0.05), BUSY))
    assert found.winner == "mixed"
    assert "mixed workers win" in found.sentence
    assert found.break_even_tokens is None


def test_a_trade_or_noise_is_no_win() -> None:
    trade = verdict("chat", result("mixed", noisy(0.4, 0.06)), result("separate", noisy(0.5, 0.03)))
    assert trade.winner == ""
    same = verdict("chat", result("mixed", noisy(0.5, 0.05)), result("separate", noisy(0.5, 0.05, seed=2)))
    assert same.winner == ""
    assert "no winner" in same.sentence
    lost = verdict("chat", result("mixed", noisy(5, 0.05)), result("separate", noisy(5, 0.05, seed=2)))
    assert "neither side carries this load" in lost.sentence


def test_break_even_is_the_length_from_which_on_separate_is_no_slower() -> None:
    mixed = [record(n, 0.1 + 0.002 * n, prompt=10 * n + 10) for n in range(60)]
    separate = [record(n, 0.15 + 0.0005 * n, prompt=10 * n + 10) for n in range(60)]
    found = break_even(length_classes(mixed, separate))
    assert found.tokens is not None
    assert 200 <= found.tokens <= 460
    assert "break-even at" in found.sentence
    none = break_even(length_classes(separate, mixed))
    assert none.tokens is None
    assert re.search(r"by mixed workers \(0\.\d+ s in the median, 0\.\d+ s on separate ones\)$", none.sentence)
    assert break_even(length_classes(mixed, mixed)).tokens == 10
    assert "too few" in break_even(length_classes(mixed[:2], separate[:2])).sentence


def test_no_stage_limits_where_none_is_busy() -> None:
    assert limiting_stage(result("x", [record(0)], {"prefill": 0.2, "decode": 0.3})).startswith("none")
    assert limiting_stage(result("x", [record(0)])).startswith("unknown")


def test_rounds_are_put_end_to_end() -> None:
    first, second = result("x", [record(n) for n in range(5)], BUSY), result("x", [record(n) for n in range(5)], BUSY)
    both = merge([first, second])
    assert [each.number for each in both.records] == list(range(10))
    assert both.figures.num_requests == 10
    assert both.figures.ttft.p50.value == first.figures.ttft.p50.value
    assert both.figures.requests_per_s <= first.figures.requests_per_s


def test_the_page_is_whole_and_asks_for_nothing_else() -> None:
    sides = [
        result("mixed", [*noisy(0.9, 0.1), record(99, lapse=Lapse.TIMEOUT)], {"mixed": 0.8}),
        result("separate", noisy(0.8, 0.06, seed=2), BUSY),
    ]
    classes = length_classes(sides[0].records, sides[1].records)
    workers = worker_section(sides)
    assert workers is not None
    summary = summary_section("Load", sides)
    curves = [(each.label, [trial_of(each)]) for each in sides]
    sections = [
        msgspec.structs.replace(summary, plots=(attainment_plot(curves, 0.9),)),
        latency_section("Latency", sides),
        length_section(classes, break_even(classes)),
        request_section(sides),
        workers,
    ]
    text = page("a < b", "sub", sections, ["who wins"])
    assert "http" not in text
    assert "src=" not in text
    assert "who wins" in text
    body = text[text.index("<body>") : text.index("</body>") + 7]
    plots = ET.fromstring(body).findall(".//svg")
    assert len(plots) == 1 + 4 + 1 + 2 + 2
    assert "timeout 1" in text


def test_lines_say_why_requests_failed() -> None:
    lines = "\n".join(describe(result("x", [record(0), record(1, lapse=Lapse.REFUSED)])))
    assert "failed: refused 1" in lines
    assert "as told" in lines
    of_single_tokens = [record(number, num_tokens=1) for number in range(3)]
    (row,) = [line for line in describe(result("x", of_single_tokens)) if line.startswith("TPOT")]
    assert row.split()[2:] == ["-"] * 5  # nothing comes after the first one
    of_nothing = describe(result("x", [record(0, lapse=Lapse.REFUSED)]))
    assert "1 requests counted, 0 answered whole" in of_nothing[0]
    assert "nan" not in " ".join(of_nothing)
    failed = [result("x", [record(0, lapse=Lapse.REFUSED)]), result("y", [])]
    assert "nan" not in page("p", "s", [summary_section("Load", failed), latency_section("Latency", failed)])
