"""Which part of a hand-off is complete and verified."""

from bisect import bisect_left
from itertools import pairwise

from disagg.core.errors import InternalFault
from disagg.core.spans import Span

_Ranges = list[tuple[int, int]]  # of tokens, ascending, neither overlapping nor touching; never changed in place


class SpanLedger:
    """Per layer and group of heads, the token ranges that have arrived. Overlaps and repeats are harmless.

    group_heads: heads that always travel together; None when all do. A part of a group does not count.

    Rows are layers, in each its groups. Most pushes cover many rows alike, so that runs of rows have the same ranges:

        rows     0 .. starts[1]-1   starts[1] .. starts[2]-1   ...   starts[-1] .. num_rows-1
        ranges   ranges[0]          ranges[1]                  ...   ranges[-1]
    """

    def __init__(self, wanted: Span, group_heads: int | None = None) -> None:
        self.wanted = wanted
        self._group_heads = group_heads or wanted.num_heads
        self._num_groups = max(1, wanted.num_heads // self._group_heads)
        self._num_rows = wanted.num_layers * self._num_groups
        self._starts = [0]
        self._ranges: list[_Ranges] = [[]]

    def add(self, span: Span) -> None:
        both = span.intersection(self.wanted)
        first = -(-(both.head_start - self.wanted.head_start) // self._group_heads)
        stop = (both.head_stop - self.wanted.head_start) // self._group_heads
        layers = range(both.layer_start - self.wanted.layer_start, both.layer_stop - self.wanted.layer_start)
        if not layers or first >= stop:
            return
        num_groups = self._num_groups
        if stop - first == num_groups:
            self._add(layers.start * num_groups, layers.stop * num_groups, span)
            return
        for layer in layers:
            self._add(layer * num_groups + first, layer * num_groups + stop, span)

    def _add(self, first_row: int, stop_row: int, span: Span) -> None:
        begin, end = self._cut(first_row), self._cut(stop_row)
        for index in range(begin, end):
            self._ranges[index] = _merged(self._ranges[index], span.token_start, span.token_stop)
        for index in range(min(end, len(self._starts) - 1), max(begin, 1) - 1, -1):
            if self._ranges[index] == self._ranges[index - 1]:
                del self._starts[index], self._ranges[index]

    def _cut(self, row: int) -> int:
        """Index of the run that begins with this row; of none where it is past the last."""
        index = bisect_left(self._starts, row)
        if row < self._num_rows and (index == len(self._starts) or self._starts[index] != row):
            self._starts.insert(index, row)
            self._ranges.insert(index, self._ranges[index - 1])
        return index

    @property
    def is_complete(self) -> bool:
        return self.complete_until() >= self.wanted.token_stop

    def complete_until(self) -> int:
        """First token that is missing in some layer or head: the longest prefix complete in all of them ends here."""
        if self.wanted.is_empty:
            return self.wanted.token_stop
        return min(_contiguous_until(ranges, self.wanted.token_start) for ranges in self._ranges)

    def complete_layers(self) -> int:
        """Layers, from the first on, that are complete in all tokens and heads."""
        wanted = self.wanted
        if wanted.is_empty:
            return wanted.num_layers
        for row, ranges in zip(self._starts, self._ranges, strict=True):
            if _contiguous_until(ranges, wanted.token_start) < wanted.token_stop:
                return row // self._num_groups
        return wanted.num_layers

    def num_missing(self) -> int:
        """Tokens that are missing, summed over layers; a group of heads counts as its part of a token."""
        wanted = self.wanted
        if wanted.is_empty:
            return 0
        here = sum(
            (stop_row - row) * max(0, min(high, wanted.token_stop) - max(low, wanted.token_start))
            for (row, stop_row), ranges in zip(pairwise([*self._starts, self._num_rows]), self._ranges, strict=True)
            for low, high in ranges
        )
        return wanted.num_tokens * wanted.num_layers - here // self._num_groups

    def check_invariants(self) -> None:
        for ranges in self._ranges:
            flat = [bound for pair in ranges for bound in pair]
            if flat != sorted(set(flat)):
                raise InternalFault(f"token ranges overlap or touch: {ranges}")
        starts = self._starts
        is_in_order = starts[0] == 0 and all(one < other for one, other in pairwise(starts))
        if not is_in_order or starts[-1] >= max(1, self._num_rows) or len(starts) != len(self._ranges):
            raise InternalFault(f"runs of rows begin at {starts}, there are {self._num_rows} rows")
        if any(one == other for one, other in pairwise(self._ranges)):
            raise InternalFault("two runs of rows that follow each other have the same token ranges")


def _contiguous_until(ranges: _Ranges, start: int) -> int:
    for low, high in ranges:
        if low <= start < high:
            return high
    return start


def _merged(ranges: _Ranges, low: int, high: int) -> _Ranges:
    if low >= high:
        return ranges
    if ranges and ranges[-1][1] == low:  # pushes mostly arrive in token order
        return [*ranges[:-1], (ranges[-1][0], high)]
    first = bisect_left(ranges, low, key=lambda pair: pair[1])
    last = first
    while last < len(ranges) and ranges[last][0] <= high:
        low, high = min(low, ranges[last][0]), max(high, ranges[last][1])
        last += 1
    return [*ranges[:first], (low, high), *ranges[last:]]
