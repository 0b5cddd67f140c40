"""Where the time of a request goes, as its front sees it: whose is noted, what becomes of it.

1 begin    with its first byte; None for a request that nobody wants to know of, which then costs nothing
2 the front says when the body was read, when a text thread had it, and when text was written
3 the service fills the tracks with what its workers say
4 end      kept among the last ones, and given to whoever exports traces
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from starlette.types import Scope

from disagg.core.errors import InvalidRequest
from disagg.dispatch.stream import GenerateRequest
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import RequestTimeline, TimelineAnswer, lay_out
from disagg.telemetry.track import ChoiceTrack, Head, RequestTrack, TrackStore

TIMELINE_HEADER: Final = "x-disagg-timeline"
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
RECEIVED_S: Final = "disagg_received_s"  # in a request's state: when its first byte was here, on time.monotonic()


def time_received(scope: Scope) -> float:
    """When the request's first byte was here; now, behind a server that does not say."""
    found: float | None = scope.get("state", {}).get(RECEIVED_S)
    return time.monotonic() if found is None else found


class Export(Protocol):
    """Takes timelines of answers that are over."""

    def __call__(self, endpoint: str, timelines: Sequence[RequestTimeline], trace: Mapping[str, str]) -> None:
        """trace: the headers with which the client says what trace its request belongs to. Never raises or waits."""

    def close(self) -> None:
        """Send what waits, for a short time. Blocking."""


class AnswerTiming:
    """Times of one HTTP request, and the tracks of its prompts."""

    def __init__(
        self, endpoint: str, trace: Mapping[str, str], received_s: float, unix_s: float, *, is_shown: bool
    ) -> None:
        self.endpoint = endpoint
        self.trace = trace
        self.is_shown = is_shown  # in the answer itself
        self.tracks: tuple[RequestTrack, ...] = ()
        self._received_s = received_s
        self._received_at = unix_s
        self._marks: list[tuple[Stage, float]] = []
        self._choices: list[ChoiceTrack] = []
        self._shown: list[ChoiceTrack] = []  # whose text is in what is being written

    def mark(self, stage: Stage, until_s: float) -> None:
        """A stage before the request is submitted is over. until_s: a reading of time.monotonic()."""
        self._marks.append((stage, until_s))

    def open(self, requests: Sequence[GenerateRequest]) -> tuple[RequestTrack, ...]:
        """One track for each prompt."""
        self.tracks = tuple(
            RequestTrack(
                Head(
                    received_s=self._received_s,
                    received_at=self._received_at,
                    marks=tuple(self._marks),
                    model=request.model,
                    tenant=request.tenant,
                    slo_class=request.slo_class,
                    num_prompt_tokens=len(request.prompt_ids),
                ),
                request.num_choices,
            )
            for request in requests
        )
        self._choices = [choice for track in self.tracks for choice in track.choices]
        return self.tracks

    def show(self, index: int) -> None:
        """Text of one more token of a choice goes out with the next write."""
        choice = self._choices[index]
        if not choice.is_written:
            choice.release(time.monotonic() if choice.is_held else 0.0)
            self._shown.append(choice)

    def hold(self, index: int) -> None:
        """Tokens of a choice have come whose text cannot go out yet."""
        self._choices[index].is_held = True

    def wrote(self) -> None:
        """What was shown is with the client, as far as this process knows."""
        if self._shown:
            now_s = time.monotonic()
            for choice in self._shown:
                choice.write(now_s)
            self._shown.clear()

    @property
    def is_written(self) -> bool:
        """Whether the front has no more to say of any choice."""
        return all(choice.is_written for choice in self._choices)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        return tuple(lay_out(track) for track in self.tracks)

    def extension(self) -> bytes:
        """The field of an answer that shows them, without commas; "" where the client did not ask."""
        return b'"disagg":' + msgspec.json.encode(TimelineAnswer(self.timelines())) if self.is_shown else b""

    def check_invariants(self) -> None:
        for track in self.tracks:
            track.check_invariants()


class Timing:
    """Keeps the last timelines; max_kept 0 and no export: notes only what a header asks for."""

    def __init__(self, max_kept: int, unix_clock: Callable[[], float], export: Export | None = None) -> None:
        self.store = TrackStore(max_kept)
        self._is_all = max_kept > 0 or export is not None
        self._unix_clock = unix_clock
        self._export = export

    def begin(self, endpoint: str, headers: Mapping[str, str], received_s: float) -> AnswerTiming | None:
        """Raises InvalidRequest for a header that makes no sense."""
        wanted = headers.get(TIMELINE_HEADER, "0").strip()
        if wanted not in ("0", "1"):
            raise InvalidRequest(
                f"'X-Disagg-Timeline' is {wanted[:64]!r}; send 1, or leave it out", param="X-Disagg-Timeline"
            )
        if not self._is_all and wanted == "0":
            return None
        trace = {name: headers[name] for name in _TRACE_HEADERS if name in headers} if self._export else {}
        return AnswerTiming(endpoint, trace, received_s, self._unix_clock(), is_shown=wanted == "1")

    def end(self, timing: AnswerTiming) -> None:
        """The answer is over, whichever way."""
        tracks = [track for track in timing.tracks if track.name]  # the others were refused
        for track in tracks:
            self.store.put(track)
        if self._export is not None and tracks:
            self._export(timing.endpoint, [lay_out(track) for track in tracks], timing.trace)
