"""Which part of a hand-off is complete and verified."""

from bisect import bisect_left

from disagg.core.errors import InternalFault
from disagg.core.spans import Span


class SpanLedger:
    """Per layer and group of heads, the token ranges that have arrived. Overlaps and repeats are harmless.

    group_heads: heads that always travel together; None when all do. A part of a group does not count.
    """

    def __init__(self, wanted: Span, group_heads: int | None = None) -> None:
        self.wanted = wanted
        self._group_heads = group_heads or wanted.num_heads
        self._num_groups = max(1, wanted.num_heads // self._group_heads)
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(wanted.num_layers * self._num_groups)]

    def add(self, span: Span) -> None:
        both = span.intersection(self.wanted)
        first = -(-(both.head_start - self.wanted.head_start) // self._group_heads)
        stop = (both.head_stop - self.wanted.head_start) // self._group_heads
        for layer in range(both.layer_start, both.layer_stop):
            for group in range(first, stop):
                at = (layer - self.wanted.layer_start) * self._num_groups + group
                self._ranges[at] = _merged(self._ranges[at], span.token_start, span.token_stop)

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
        for index, ranges in enumerate(self._ranges):
            if _contiguous_until(ranges, wanted.token_start) < wanted.token_stop:
                return index // self._num_groups
        return wanted.num_layers

    def num_missing(self) -> int:
        """Tokens that are missing, summed over layers; a group of heads counts as its part of a token."""
        wanted = self.wanted
        if wanted.is_empty:
            return 0
        here = sum(
            max(0, min(high, wanted.token_stop) - max(low, wanted.token_start))
            for ranges in self._ranges
            for low, high in ranges
        )
        return wanted.num_tokens * wanted.num_layers - here // self._num_groups

    def check_invariants(self) -> None:
        for ranges in self._ranges:
            flat = [bound for pair in ranges for bound in pair]
            if flat != sorted(set(flat)):
                raise InternalFault(f"token ranges overlap or touch: {ranges}")


def _contiguous_until(ranges: list[tuple[int, int]], start: int) -> int:
    for low, high in ranges:
        if low <= start < high:
            return high
    return start


def _merged(ranges: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
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
