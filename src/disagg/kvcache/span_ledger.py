"""Which part of a hand-off is complete and verified."""

from bisect import bisect_left

from disagg.core.errors import InternalFault
from disagg.core.spans import Span


class SpanLedger:
    """Per layer, the token ranges that have arrived. Overlaps and repeats are harmless."""

    def __init__(self, wanted: Span) -> None:
        self.wanted = wanted
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(wanted.num_layers)]

    def add(self, span: Span) -> None:
        for layer in range(
            max(span.layer_start, self.wanted.layer_start), min(span.layer_stop, self.wanted.layer_stop)
        ):
            self._ranges[layer - self.wanted.layer_start] = _merged(
                self._ranges[layer - self.wanted.layer_start], span.token_start, span.token_stop
            )

    @property
    def is_complete(self) -> bool:
        return self.complete_until() >= self.wanted.token_stop

    def complete_until(self) -> int:
        """First token that is missing in some layer: the longest prefix complete in all layers ends here."""
        if self.wanted.is_empty:
            return self.wanted.token_stop
        return min(_contiguous_until(ranges, self.wanted.token_start) for ranges in self._ranges)

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
