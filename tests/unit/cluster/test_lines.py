"""Output is cut into the same lines however it arrives."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from disagg.cluster.lines import LineSplitter


@given(text=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=10))
def test_lines_do_not_depend_on_how_bytes_arrive(text: bytes, cuts: list[int]) -> None:
    splitter = LineSplitter(max_line_bytes=1000)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    lines: list[str] = []
    for start, stop in itertools.pairwise(edges):
        lines += splitter.feed(text[start:stop])
        splitter.check_invariants()
    lines += splitter.flush()
    whole = [line.decode("utf-8", "replace").rstrip() for line in text.split(b"\n")]
    assert lines == [line for line in whole if line]


def test_an_endless_line_takes_bounded_memory() -> None:
    splitter = LineSplitter(max_line_bytes=10)
    lines = [line for _ in range(100) for line in splitter.feed(b"abc")]
    splitter.check_invariants()
    assert "".join(lines + splitter.flush()) == "abc" * 100
