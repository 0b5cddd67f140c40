"""What became of one request, as its client saw it. One JSON line each."""

import enum
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from disagg.bench.slo import Slo
from disagg.core.errors import ConfigurationError


class Lapse(enum.StrEnum):
    """Why a request has no whole answer."""

    REFUSED = "refused"  # HTTP 429 or 503: come back later
    STATUS = "status"  # any other HTTP status but 200
    CONNECTION = "connection"  # could not connect, or the connection was lost
    TIMEOUT = "timeout"
    BROKEN = "broken"  # the stream ended without its end mark, or is none
    ERROR_EVENT = "error event"  # the server said in mid-stream that it failed
    EMPTY = "empty"  # a whole answer without a token
    NOT_SENT = "not sent"  # this client had too many open


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All times in seconds on one clock from the start of the load; latencies count from due_s.

    So a client or server that falls behind makes the figures worse and does not hide behind sending less.
    token_s: one entry per event with text, stamped when the read that brought it returned.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    token_s: tuple[float, ...] = ()
    num_prompt_tokens: int  # as the server counted them, else as asked for
    num_output_tokens: int = 0  # as the server counted them, else events
    num_cached_tokens: int = 0
    session: int = -1
    is_warm_up: bool = False
    lapse: Lapse | None = None
    detail: str = ""

    @property
    def is_whole(self) -> bool:
        return self.lapse is None

    @property
    def ttft_s(self) -> float:
        """Only of whole ones, as all that follow."""
        return self.token_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        """End to end: to the last token."""
        return self.token_s[-1] - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in itertools.pairwise(self.token_s))

    @property
    def first_gap_s(self) -> float | None:
        return self.token_s[1] - self.token_s[0] if len(self.token_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one."""
        num_after = max(self.num_output_tokens, len(self.token_s)) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_after if num_after > 0 else None

    @property
    def num_unseen_tokens(self) -> int:
        """Tokens without an event of their own: their gaps are seen as parts of longer ones."""
        return max(0, self.num_output_tokens - len(self.token_s)) if self.is_whole else 0

    def attains(self, slo: Slo) -> bool:
        """Whole, and within every target."""
        return self.is_whole and self.meets_ttft(slo) and self.meets_tpot(slo)

    def meets_ttft(self, slo: Slo) -> bool:
        return self.is_whole and self.ttft_s <= slo.ttft_s

    def meets_tpot(self, slo: Slo) -> bool:
        return self.is_whole and (self.tpot_s or 0.0) <= slo.tpot_s


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """JSON lines. Raises ConfigurationError where nothing can be written."""
    encoder = msgspec.json.Encoder()
    try:
        with path.open("wb") as file:
            file.writelines(encoder.encode(record) + b"\n" for record in records)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}; name another file") from None


def read_records(lines: Iterable[bytes]) -> Iterator[RequestRecord]:
    """The way back. Raises ConfigurationError with the line's number."""
    decoder = msgspec.json.Decoder(RequestRecord)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"line {number} is no request record: {error}") from None
