"""Timelines: the time of a request split into stages that add up to what its client saw.

A timeline is laid out from a track, whose times are all the router's, in three parts:

  ttft       request received -> first token written   router, then the workers of the attempt that brought the token
  first_gap  -> second token written                    what is visible of hand-off, decode queue and first step
  stream     -> end

A worker's stages fill the router's round trip to it: from telling it to its token, or, for the second token, from the
first token on. What is left of the trip the worker has not spent: the network's, and what queued at both of its ends.
Where reports say more than there is room for, their earliest part was over before the client began to wait for it.
"""

import enum
import math
from collections.abc import Sequence

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import WorkerId
from disagg.telemetry.stages import Stage, StageTime
from disagg.telemetry.track import Arrival, Attempt, ChoiceTrack, RequestTrack

DUST_S = 1e-9  # what is left by rounding, and no stage
NOBODY = WorkerId("")


class Part(enum.StrEnum):
    """Of what the client waits for."""

    TTFT = "ttft"
    FIRST_GAP = "first_gap"
    STREAM = "stream"


class TimelineStage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One stretch of time. start_s: seconds since the request was received."""

    part: Part
    stage: Stage
    start_s: float
    seconds: float
    worker: WorkerId = NOBODY
    num_tokens: int = 0  # of a chunk of the prompt


class ChoiceTimeline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice. Of its last attempt, where it says nothing else.

    The stages of each part follow each other without a hole. ttft_s and first_gap_s: None for tokens that never came.
    """

    choice: int
    outcome: str
    path: str
    placement_reason: str
    fallback_reason: str  # "": the path is the intended one
    prefill_worker: str
    decode_worker: str
    transport: str
    num_attempts: int
    moves: tuple[str, ...]  # why each earlier attempt was left
    num_cached_tokens: int
    num_output_tokens: int
    handoff_bytes: int  # of all attempts
    hidden_bytes: int  # of those, verified before the prompt was computed
    hidden_transfer_s: float  # seconds in which KV travelled while the prompt was still being computed
    ttft_s: float | None
    first_gap_s: float | None
    total_s: float
    overlap_s: float  # reported by workers, and over before the client waited for it
    stages: tuple[TimelineStage, ...]

    def seconds(self, part: Part, stage: Stage | None = None) -> float:
        """Of a part, or of one stage of it."""
        return math.fsum(e.seconds for e in self.stages if e.part is part and stage in (None, e.stage))

    def check_invariants(self) -> None:
        """Raises InternalFault when the stages do not follow each other or do not add up."""
        at_s = 0.0
        for each in self.stages:
            if abs(each.start_s - at_s) > 1e-6 or each.seconds < 0.0:
                raise InternalFault(f"{each} begins at {each.start_s}, the one before ended at {at_s}")
            at_s = each.start_s + each.seconds
        for part, seconds in ((Part.TTFT, self.ttft_s), (Part.FIRST_GAP, self.first_gap_s)):
            if seconds is not None and abs(self.seconds(part) - seconds) > 1e-6:
                raise InternalFault(f"the stages of {part} are {self.seconds(part)} s, it took {seconds} s")


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prompt and its answers."""

    request_id: str
    received_at: float  # Unix time in seconds
    model: str
    num_prompt_tokens: int
    choices: tuple[ChoiceTimeline, ...]
    slo_class: str = "default"


class TimelineAnswer(msgspec.Struct, frozen=True, gc=False):
    """What a client that asks for timelines is answered."""

    timelines: tuple[RequestTimeline, ...] = ()


def lay_out(track: RequestTrack) -> RequestTimeline:
    """What the track says so far."""
    head = track.head
    choices = tuple(_Layout(track, choice).timeline(index) for index, choice in enumerate(track.choices))
    return RequestTimeline(
        request_id=track.name,
        received_at=head.received_at,
        model=head.model,
        num_prompt_tokens=head.num_prompt_tokens,
        choices=choices,
        slo_class=head.slo_class,
    )


_Spent = tuple[WorkerId, StageTime]  # what a worker has reported


class _Layout:
    """Lays stages of one choice end to end. at_s: how far it has come, on the router's clock."""

    def __init__(self, track: RequestTrack, choice: ChoiceTrack) -> None:
        self._head = track.head
        self._choice = choice
        self._at_s = track.head.received_s
        self._part = Part.TTFT
        self._stages: list[TimelineStage] = []
        self._overlap_s = 0.0

    def timeline(self, index: int) -> ChoiceTimeline:
        choice, received_s = self._choice, self._head.received_s
        for stage, until_s in self._head.marks:
            self._until(stage, until_s)
        ends: list[float | None] = [None, None]
        for number, (part, arrival) in enumerate(zip((Part.TTFT, Part.FIRST_GAP), choice.arrivals, strict=False)):
            self._part, begin_s = part, self._at_s
            self._arrive(arrival, choice.arrivals[number - 1] if number else None)
            if number < len(choice.written_s):
                if number < len(choice.released_s):
                    self._until(Stage.HELD, choice.released_s[number])
                self._until(Stage.WRITE, choice.written_s[number])
            ends[number] = self._at_s - (begin_s if number else received_s)
        end_s = self._at_s if choice.ended_s is None else choice.ended_s
        if choice.arrivals:
            self._part = Part.STREAM
            self._until(Stage.STREAM, end_s, self._writer())
        else:
            self._wait(end_s)
        return self._finished(index, ends[0], ends[1])

    def _finished(self, index: int, ttft_s: float | None, first_gap_s: float | None) -> ChoiceTimeline:
        choice = self._choice
        trip = choice.attempts[-1].trip if choice.attempts else None
        return ChoiceTimeline(
            choice=index,
            outcome=choice.outcome,
            path=trip.path if trip else "",
            placement_reason=trip.reason if trip else "",
            fallback_reason=trip.reason if trip and trip.is_fallback else "",
            prefill_worker=(trip.prefill or "") if trip else "",
            decode_worker=self._writer(),
            transport=trip.transport if trip else "",
            num_attempts=len(choice.attempts),
            moves=tuple(each.cause for each in choice.attempts if each.cause),
            num_cached_tokens=choice.num_cached_tokens or 0,
            num_output_tokens=choice.num_output_tokens,
            handoff_bytes=choice.handoff_bytes,
            hidden_bytes=choice.hidden_bytes,
            hidden_transfer_s=choice.hidden_s,
            ttft_s=ttft_s,
            first_gap_s=first_gap_s,
            total_s=self._at_s - self._head.received_s,
            overlap_s=self._overlap_s,
            stages=tuple(self._stages),
        )

    def _writer(self) -> WorkerId:
        return self._choice.attempts[-1].trip.decode if self._choice.attempts else NOBODY

    # --- one token ---------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, previous: Arrival | None) -> None:
        """Fill the time until a token came from a worker."""
        if arrival.at_s <= self._at_s:
            return
        attempt = next((each for each in self._choice.attempts if each.trip.attempt == arrival.attempt), None)
        if attempt is None:
            self._until(Stage.UNREPORTED, arrival.at_s, arrival.worker)
            return
        if previous is not None and previous.attempt == arrival.attempt:
            spent = self._spent_since(previous, arrival)
        else:  # all that this attempt did was for this token
            self._wait(attempt.placed_s)
            spent = self._spent_since_start(attempt, arrival)
        self._fit(spent, attempt, arrival)

    def _spent_since_start(self, attempt: Attempt, arrival: Arrival) -> list[_Spent]:
        """A decode worker that has waited for a prefill worker says so; what that one says itself says more."""
        found: list[_Spent] = []
        prefill = attempt.trip.prefill
        for each in self._reported(arrival.attempt, arrival.worker, -1, arrival.position):
            if each[1].stage is Stage.PREFILL_ELSEWHERE and prefill is not None:
                found += self._reported(arrival.attempt, prefill, -1, arrival.position) or [each]
            else:
                found.append(each)
        return found

    def _spent_since(self, previous: Arrival, arrival: Arrival) -> list[_Spent]:
        """What this worker did after the attempt's previous token; since it was ready, if another had it."""
        after = previous.position if previous.worker == arrival.worker else -1
        spent = self._reported(arrival.attempt, arrival.worker, after, arrival.position)
        return [(worker, time) for worker, time in spent if time.stage is not Stage.PREFILL_ELSEWHERE]

    def _reported(self, attempt: int, worker: WorkerId, after: int, position: int) -> list[_Spent]:
        """Stages until the token at `position`, of reports after that of the token at `after`."""
        reports = self._choice.reports
        if not reports:
            return []
        return [
            (worker, each)
            for (of, by, at), stages in sorted(reports.items())
            if of == attempt and by == worker and after < at <= position
            for each in stages
        ]

    def _fit(self, spent: Sequence[_Spent], attempt: Attempt, arrival: Arrival) -> None:
        """Lay what a worker spent so that it ends with the token's arrival; the network has the rest."""
        if not spent:
            self._until(Stage.UNREPORTED, arrival.at_s, arrival.worker)
            return
        is_reader = arrival.worker == attempt.trip.prefill
        rest = Stage.NETWORK_PREFILL if is_reader else Stage.NETWORK_DECODE
        room_s = arrival.at_s - self._at_s
        sane_s = [_sane(time.seconds) for _, time in spent]
        excess_s = math.fsum(sane_s) - room_s
        if excess_s > DUST_S:
            self._overlap_s += excess_s
        for (worker, time), seconds in zip(spent, sane_s, strict=True):
            passed_s = min(seconds, max(0.0, excess_s))
            excess_s -= passed_s
            self._add(time.stage, seconds - passed_s, worker, time.num_tokens)
        self._until(rest, arrival.at_s, arrival.worker)

    def _wait(self, end_s: float) -> None:
        """Fill the time until then with what became of it at the router: it waits there, or is on lost workers."""
        for attempt in self._choice.attempts:
            if attempt.placed_s >= end_s:
                break
            self._until(Stage.ROUTER_QUEUE, attempt.placed_s)
            self._until(Stage.LOST, min(attempt.left_s, end_s), attempt.trip.decode)
        self._until(Stage.ROUTER_QUEUE, end_s)

    # --- laying ------------------------------------------------------------------------------------------------

    def _until(self, stage: Stage, end_s: float, worker: WorkerId = NOBODY) -> None:
        """Nothing when that is over already."""
        start_s = self._at_s
        if end_s > start_s:
            if end_s - start_s > DUST_S:
                since_s = start_s - self._head.received_s
                self._stages.append(TimelineStage(self._part, stage, since_s, end_s - start_s, worker))
            self._at_s = end_s

    def _add(self, stage: Stage, seconds: float, worker: WorkerId, num_tokens: int = 0) -> None:
        if seconds > DUST_S:
            start_s = self._at_s - self._head.received_s
            self._stages.append(TimelineStage(self._part, stage, start_s, seconds, worker, num_tokens))
            self._at_s += seconds


def _sane(seconds: float) -> float:
    """Peers are other programs: what is no duration counts for nothing."""
    return seconds if 0.0 <= seconds < math.inf else 0.0
