"""What became of each request, in columns: a hundred bytes each, however many there are."""

import math
from array import array
from collections.abc import Iterator

import msgspec

from disagg.bench.percentiles import Sketch
from disagg.bench.workload import ANSWER_LABEL, WorkRequest
from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId
from disagg.core.request import EmittedToken
from disagg.dispatch.open_request import OpenRequest
from disagg.telemetry.track import RequestTrack

PATHS = ("", "mixed", "local", "remote")  # policy.routing.Path, "" for a request that was turned away
ENDS = ("open", "finished", "failed", "turned_away")
OPEN, FINISHED, FAILED, TURNED_AWAY = range(4)


class RequestRecord(msgspec.Struct, frozen=True):
    """One request; times in virtual seconds, NaN where there is none."""

    number: int
    arrived_s: float
    ended_s: float
    end: str  # of ENDS
    path: str  # of PATHS
    num_prompt_tokens: int
    num_output_tokens: int  # delivered
    num_cached_tokens: int
    queue_s: float  # from arrival to the first step that reads its prompt
    ttft_s: float
    first_gap_s: float  # first to second token: what is visible of hand-off, decode queue and first step
    tpot_s: float  # 0 for an answer of one token
    max_itl_s: float


class OpenRecord:
    """A request under way."""

    __slots__ = (
        "arrived_s",
        "first_s",
        "holder",
        "last_s",
        "max_gap_s",
        "num_held",
        "num_tokens",
        "opened",
        "request",
        "second_s",
        "started_s",
        "track",
    )

    def __init__(
        self,
        request: WorkRequest,
        arrived_s: float,
        opened: OpenRequest | None = None,
        track: RequestTrack | None = None,
    ) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.opened = opened
        self.track = track  # where its time goes, if that is kept
        self.started_s = self.first_s = self.second_s = self.last_s = math.nan
        self.max_gap_s = 0.0
        self.num_tokens = 0
        self.num_held = 0  # of these, the last ones that the router has not been told of
        self.holder: object = None  # the worker that wrote the last of them


def take_held(record: OpenRecord, sequence_id: SequenceId, stop: int) -> list[EmittedToken]:
    """The tokens that were kept back, which end before position `stop`; now they are not."""
    num_held, record.num_held = record.num_held, 0
    return [EmittedToken(sequence_id, position, ANSWER_LABEL) for position in range(stop - num_held, stop)]


_COLUMNS = (
    ("arrived_s", "d"),
    ("ended_s", "d"),
    ("end", "b"),
    ("path", "b"),
    ("num_prompt_tokens", "l"),
    ("num_output_tokens", "l"),
    ("num_cached_tokens", "l"),
    ("queue_s", "d"),
    ("ttft_s", "d"),
    ("first_gap_s", "d"),
    ("tpot_s", "d"),
    ("max_itl_s", "d"),
)


class RecordTable:
    """Ended requests, in order of their ends; and all gaps between tokens, counted."""

    def __init__(self) -> None:
        self.number = array("l")
        self.columns: dict[str, array[float]] = {name: array(code) for name, code in _COLUMNS}  # or of whole numbers
        self.gaps = Sketch()
        self._gap_s = 0.0
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self.number)

    def __iter__(self) -> Iterator[RequestRecord]:
        for number, end, path, *rest in zip(
            self.number, self.columns["end"], self.columns["path"], *self._without_names(), strict=True
        ):
            arrived_s, ended_s, *numbers = rest
            yield RequestRecord(number, arrived_s, ended_s, ENDS[int(end)], PATHS[int(path)], *numbers)

    def _without_names(self) -> list["array[float]"]:
        return [self.columns[name] for name, _ in _COLUMNS if name not in ("end", "path")]

    def note_token(self, record: OpenRecord, now_s: float) -> None:
        """The next token of an answer; the same gap many times in a row is counted at once."""
        record.num_tokens = num_tokens = record.num_tokens + 1
        if num_tokens <= 2:
            if num_tokens == 1:
                record.first_s = record.last_s = now_s
                return
            record.second_s = now_s
        gap_s = now_s - record.last_s
        record.last_s = now_s
        if gap_s > record.max_gap_s:
            record.max_gap_s = gap_s
        if gap_s == self._gap_s:
            self._num_gaps += 1
        else:
            self.count_gaps()
            self._gap_s, self._num_gaps = gap_s, 1

    def count_more(self, gap_s: float, num: int) -> None:
        """So many more tokens came that long after the ones before."""
        if gap_s != self._gap_s:
            self.count_gaps()
            self._gap_s = gap_s
        self._num_gaps += num

    def count_gaps(self) -> None:
        """What was noted and not counted yet."""
        if self._num_gaps:
            self.gaps.add(self._gap_s, self._num_gaps)
            self._num_gaps = 0

    def close(self, record: OpenRecord, end: int, now_s: float) -> None:
        num_tokens, opened = record.num_tokens, record.opened
        tpot_s = (record.last_s - record.first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        self.number.append(record.request.number)
        values = (
            record.arrived_s,
            now_s,
            end,
            PATHS.index(opened.path.value) if opened is not None else 0,
            record.request.num_prompt_tokens,
            num_tokens,
            opened.num_cached_tokens if opened is not None else 0,
            record.started_s - record.arrived_s,
            record.first_s - record.arrived_s,
            record.second_s - record.first_s,
            tpot_s if num_tokens else math.nan,
            record.max_gap_s if num_tokens > 1 else math.nan,
        )
        for (name, _), value in zip(_COLUMNS, values, strict=True):
            self.columns[name].append(value)

    def check_invariants(self) -> None:
        if any(len(column) != len(self.number) for column in self.columns.values()):
            raise InternalFault("columns of records differ in length")
        self.gaps.check_invariants()

    def fingerprint(self) -> bytes:
        """All columns' bytes: equal for equal runs."""
        return self.number.tobytes() + b"".join(self.columns[name].tobytes() for name, _ in _COLUMNS)
