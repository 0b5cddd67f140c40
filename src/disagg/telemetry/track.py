"""What a router notes of one request while it is open, all on its own clock; a timeline is made of it later.

Who notes what: the HTTP front makes the track and says when a token's text was written; the dispatcher says who was
told, what workers reported, and when tokens came.
"""

import itertools
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import WorkerId
from disagg.telemetry.stages import MAX_STAGES, Stage, StageTime

NUM_TIMED = 2  # tokens of each choice whose stages are wanted
MAX_REPORTS = 64  # of one choice, from all its attempts


class Head(msgspec.Struct, frozen=True):
    """What is known of a request when it is submitted.

    marks: (stage, when it was over); each stage begins with the end of the one before, the first at received_s.
    """

    received_s: float
    received_at: float = 0.0  # Unix time in seconds, for people
    marks: tuple[tuple[Stage, float], ...] = ()
    model: str = ""
    tenant: str = ""  # who may see it
    slo_class: str = "default"
    num_prompt_tokens: int = 0


class Trip(msgspec.Struct, frozen=True):
    """Where an attempt of a choice goes, and why."""

    attempt: int
    path: str
    reason: str
    is_fallback: bool
    decode: WorkerId
    prefill: WorkerId | None = None
    transport: str = ""  # of the KV; "" where none travels


class Attempt:
    """A trip, and the time that it had."""

    __slots__ = ("cause", "left_s", "placed_s", "trip")

    def __init__(self, trip: Trip, placed_s: float) -> None:
        self.trip = trip
        self.placed_s = placed_s
        self.left_s = float("inf")
        self.cause = ""  # why it was left


class Arrival(NamedTuple):
    """A token that came from a worker."""

    at_s: float
    attempt: int  # that brought it
    worker: WorkerId
    position: int


class ChoiceTrack:
    """One choice. Bounded: the first tokens, each attempt, and so many reports."""

    __slots__ = (
        "arrivals",
        "attempts",
        "ended_s",
        "handoff_bytes",
        "hidden_bytes",
        "hidden_s",
        "is_held",
        "num_cached_tokens",
        "num_output_tokens",
        "outcome",
        "released_s",
        "reports",
        "written_s",
    )

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.arrivals: list[Arrival] = []
        self.is_held = False  # text had to wait for later tokens
        self.released_s: list[float] = []  # until when, of the first text and the second; 0.0: it was not
        self.written_s: list[float] = []  # when they were out
        self.reports: dict[tuple[int, WorkerId, int], tuple[StageTime, ...]] = {}  # attempt, worker, position
        self.num_cached_tokens: int | None = None  # until a worker has said
        self.num_output_tokens = 0
        self.handoff_bytes = 0
        self.hidden_bytes = 0
        self.hidden_s = 0.0
        self.ended_s: float | None = None
        self.outcome = "open"

    # --- by the dispatcher -------------------------------------------------------------------------------------

    def place(self, trip: Trip, now_s: float) -> None:
        """Workers have been told."""
        self.attempts.append(Attempt(trip, now_s))

    def leave(self, cause: str, now_s: float) -> None:
        """It is taken from its workers."""
        if self.attempts:
            self.attempts[-1].left_s = now_s
            self.attempts[-1].cause = cause

    def report(self, attempt: int, worker: WorkerId, position: int, stages: tuple[StageTime, ...]) -> None:
        """What a worker spent until it had the token at this position, since its start or its last report."""
        if len(self.reports) < MAX_REPORTS:
            self.reports.setdefault((attempt, worker, position), stages[: 2 * MAX_STAGES])

    def read_prompt(self, num_cached_tokens: int, handoff_bytes: int, hidden_bytes: int, hidden_s: float) -> None:
        """A worker has read it; of attempts that read it again the bytes count too."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
        self.handoff_bytes += handoff_bytes
        self.hidden_bytes += hidden_bytes
        self.hidden_s += hidden_s

    def arrive(self, worker: WorkerId, position: int, num_tokens: int, now_s: float) -> None:
        """Tokens from this position on are the next in order. After the first two it does nothing."""
        for each in range(position, position + min(num_tokens, NUM_TIMED - len(self.arrivals))):
            self.arrivals.append(Arrival(now_s, self._attempt_of(worker, each), worker, each))

    def _attempt_of(self, worker: WorkerId, position: int) -> int:
        """A late token of an earlier attempt says so by its report."""
        if len(self.attempts) == 1:
            return self.attempts[0].trip.attempt
        for attempt in reversed(self.attempts):
            if (attempt.trip.attempt, worker, position) in self.reports:
                return attempt.trip.attempt
        return self.attempts[-1].trip.attempt if self.attempts else 0

    def end(self, outcome: str, num_output_tokens: int, now_s: float) -> None:
        self.outcome = outcome
        self.num_output_tokens = num_output_tokens
        self.ended_s = now_s

    # --- by the front ------------------------------------------------------------------------------------------

    def release(self, at_s: float) -> None:
        """The next text may go out; since at_s, if it had been held back, else 0.0."""
        if len(self.released_s) < NUM_TIMED:
            self.released_s.append(at_s)

    def write(self, now_s: float) -> None:
        """The next text has been written to the client."""
        if len(self.written_s) < NUM_TIMED:
            self.written_s.append(now_s)

    @property
    def is_written(self) -> bool:
        """Whether the front has no more to say."""
        return len(self.written_s) >= NUM_TIMED

    def check_invariants(self) -> None:
        times = [attempt.placed_s for attempt in self.attempts]
        if times != sorted(times) or len(self.arrivals) > NUM_TIMED or len(self.reports) > MAX_REPORTS:
            raise InternalFault(f"placed at {times}, {len(self.arrivals)} arrivals, {len(self.reports)} reports")


class RequestTrack:
    """One prompt and its choices."""

    __slots__ = ("choices", "head", "name")

    def __init__(self, head: Head, num_choices: int) -> None:
        self.head = head
        self.name = ""  # the request's id, once it is open
        self.choices = tuple(ChoiceTrack() for _ in range(num_choices))

    def check_invariants(self) -> None:
        for choice in self.choices:
            choice.check_invariants()


class TrackStore:
    """Tracks of the last requests that ended, by name."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._tracks: OrderedDict[str, RequestTrack] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracks)

    def put(self, track: RequestTrack) -> None:
        self._tracks[track.name] = track
        while len(self._tracks) > self._max_kept:
            self._tracks.popitem(last=False)

    def get(self, name: str, tenant: str) -> RequestTrack | None:
        """None for one that is not kept, or another tenant's."""
        track = self._tracks.get(name)
        return track if track is not None and track.head.tenant == tenant else None

    def last(self, number: int, tenant: str) -> list[RequestTrack]:
        """The tenant's latest, newest first."""
        own = (track for track in reversed(self._tracks.values()) if track.head.tenant == tenant)
        return list(itertools.islice(own, number))

    def check_invariants(self) -> None:
        if len(self._tracks) > self._max_kept:
            raise InternalFault(f"{len(self._tracks)} tracks are kept, the limit is {self._max_kept}")
