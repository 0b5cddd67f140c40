"""Drawings are well-formed, in bounds, and say so when there is nothing to draw."""

import math
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from disagg.report.page import Section, Table, page
from disagg.report.plots import (
    HEIGHT,
    WIDTH,
    Bar,
    Mark,
    Row,
    Series,
    Span,
    bar_plot,
    line_plot,
    share_below,
    ticks,
    waterfall,
)

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20), st.lists(NUMBERS, max_size=2))
def test_a_line_stays_inside_its_plot(points: list[tuple[float, float]], marks: list[float]) -> None:
    svg = line_plot("a & b", "x <y>", "y", [Series("one", tuple(points))], [Mark("m", x) for x in marks])
    root = ET.fromstring(svg)
    for line in root.iter("polyline"):
        for place in line.attrib["points"].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT
    if not points:
        assert "nothing to show" in svg


@given(NUMBERS, NUMBERS)
def test_ticks_cover_the_range_and_rise(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found == sorted(set(found))
    assert 2 <= len(found) <= 12
    if high > low + 1e-3:
        slack = 1e-6 * max(1.0, abs(low), abs(high))
        assert found[0] <= low + slack
        assert found[-1] >= high - slack


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=400))
def test_shares_rise_to_one(values: list[float]) -> None:
    points = share_below([*values, math.nan])
    assert points[-1] == (max(values), 1.0)
    assert list(points) == sorted(points)
    for value, share in points:
        assert share <= sum(each <= value for each in values) / len(values) + 1e-12


def test_what_is_not_finite_is_left_out() -> None:
    svg = line_plot("t", "x", "y", [Series("one", ((0.0, math.nan), (1.0, 2.0), (math.inf, 3.0)))])
    (line,) = ET.fromstring(svg).iter("polyline")
    assert len(line.attrib["points"].split()) == 1


def test_a_bar_is_as_long_as_its_value_says() -> None:
    svg = bar_plot("t", [Bar("half", 0.5, "50 %"), Bar("all", 1.0, "100 %"), Bar("over", 3.0, "")], most=1.0)
    half, whole, over = (float(each.attrib["width"]) for each in ET.fromstring(svg).iter("rect"))
    assert whole == over == 2 * half


def test_a_page_is_whole_and_escapes_what_it_is_given() -> None:
    table = Table(("<head>",), (("a & b",),))
    text = page("<script>", "sub", [Section("One", "words", (table,), (bar_plot("t", []),))])
    assert "<script" not in text
    assert "a &amp; b" in text
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http-equiv", "")


def test_moments_too_near_each_other_do_not_hide_their_bar() -> None:
    every = tuple(number / 1000 for number in range(1001))
    drawn = waterfall("t", "seconds", [Row("a", (Span(0.0, 1.0, 0),), every)], ("k",))
    assert 100 < drawn.count("v10") < 200  # of about 480 places across
    few = waterfall("t", "seconds", [Row("a", (Span(0.0, 1.0, 0),), (0.0, 0.5, 1.0))], ("k",))
    assert few.count("v10") == 3
