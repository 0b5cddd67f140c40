"""A GenerationService without workers: scripted tokens, failures and pauses, and a record of what was asked of it.

service = FakeGenerationService([ready("m")], lambda request: Script(tokens=((5, 6, 7),)))
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from disagg.core.errors import DisaggError, ModelNotFound
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, FinishReason, TokenLogprobs, finish_reason
from disagg.dispatch.stream import GenerateRequest, ModelStatus, RequestFailed, StreamEvent, TokensDelivered
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import Metric
from disagg.telemetry.track import NUM_TIMED, ChoiceTrack, RequestTrack, Trip

_TRIP = Trip(1, "mixed", "mixed_worker", is_fallback=False, decode=WorkerId("fake"))


class Script(msgspec.Struct, frozen=True):
    """What happens to one request.

    Choice i gets tokens[i % len(tokens)], one token an event, the choices in turn. A choice ends by its sampling
    parameters, or with its last scripted token as if that were the end of the text.
    """

    tokens: tuple[tuple[int, ...], ...] = ((),)  # empty: the prompt's own ids are the answer
    refusal: DisaggError | None = None  # submit() raises it
    failure: Exception | None = None  # a DisaggError is an event; anything else is raised out of the iterator
    failure_after: int = 0  # events before the failure
    held_after: int | None = None  # events before the stream waits for release(); None: never waits
    num_cached_tokens: int = 0


ScriptFor = Callable[[GenerateRequest], Script]


def ready(model: str, max_context: int = 4096) -> ModelStatus:
    """A model that is served."""
    return ModelStatus(model, True, "", max_context)


def not_ready(model: str, missing: str = "no decode worker has registered") -> ModelStatus:
    """A model whose workers have not come up."""
    return ModelStatus(model, False, missing, None)


class FakeTokenStream:
    """One scripted stream. Its public fields say what the front did with it."""

    def __init__(
        self, request_id: RequestId, request: GenerateRequest, script: Script, track: RequestTrack | None = None
    ) -> None:
        self.request = request
        self.script = script
        self.num_aborts = 0
        self.finished_choices: list[int] = []  # those that finish_choice() was called for
        self.num_events = 0
        self.held = asyncio.Event()  # set while the stream waits for release()
        self.aborted = asyncio.Event()
        self._request_id = request_id
        self._released = asyncio.Event()
        self._open = set(range(request.num_choices))
        self._track = track
        if track is not None:
            track.name = str(request_id)
            for choice in track.choices:
                choice.place(_TRIP, time.monotonic())

    @property
    def request_id(self) -> RequestId:
        return self._request_id

    @property
    def num_cached_tokens(self) -> int:
        return self.script.num_cached_tokens

    @property
    def is_timed(self) -> bool:
        """Whether the front wants to know where its time goes."""
        return self._track is not None

    @property
    def is_done(self) -> bool:
        """Whether every choice has finished."""
        return not self._open

    async def events(self) -> AsyncIterator[StreamEvent]:
        position = 0
        while self._open and not self.aborted.is_set():
            for choice in sorted(self._open):
                await self._pass_gate()
                if self.aborted.is_set():
                    return
                if self.script.failure is not None and self.num_events >= self.script.failure_after:
                    self._open.clear()
                    if not isinstance(self.script.failure, DisaggError):
                        raise self.script.failure
                    yield RequestFailed(self.script.failure)
                    return
                if choice in self._open:  # finish_choice() may have come since the round began
                    self.num_events += 1
                    yield self._deliver(choice, position)
            position += 1

    def take_ready(self) -> list[StreamEvent]:
        return []

    def push_to(self, take: Callable[[TokensDelivered], bool]) -> None:
        """Here nothing comes by itself."""

    def finish_choice(self, choice: int) -> None:
        self.finished_choices.append(choice)
        self._open.discard(choice)

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted.set()
        self._released.set()

    def release(self) -> None:
        """Let a held stream go on to its end."""
        self._released.set()

    def check_invariants(self) -> None:
        """Raises AssertionError when the front stopped a choice that does not exist."""
        assert all(0 <= choice < self.request.num_choices for choice in self.finished_choices)

    async def _pass_gate(self) -> None:
        await asyncio.sleep(0)  # as a real stream lets others run while it waits for its workers
        if self.script.held_after is not None and self.num_events >= self.script.held_after:
            self.held.set()
            await self._released.wait()

    def _deliver(self, choice: int, position: int) -> TokensDelivered:
        ids = self._scripted(choice)
        token_id = ids[position]
        reason = finish_reason(self.request.sampling, token_id, position + 1)
        if reason is None and position + 1 == len(ids):
            reason = FinishReason.STOP
        if reason is not None:
            self._open.discard(choice)
        if self._track is not None:
            self._note(self._track.choices[choice], position, reason)
        sequence_id = SequenceId(self._request_id, choice)
        scores = self._prompt_logprobs() if (choice, position) == (0, 0) else None
        token = EmittedToken(sequence_id, position, token_id, self._logprobs(token_id), scores)
        return TokensDelivered(choice, (token,), reason)

    def _note(self, track: ChoiceTrack, position: int, reason: FinishReason | None) -> None:
        """A service says when tokens came; workers that would say more there are none."""
        now_s = time.monotonic()
        if position < NUM_TIMED:
            track.arrive(_TRIP.decode, position, 1, now_s)
        if reason is not None:
            track.end("finished", position + 1, now_s)

    def _scripted(self, choice: int) -> tuple[int, ...]:
        return self.script.tokens[choice % len(self.script.tokens)] or self.request.prompt_ids

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of a token its own id says all."""
        wanted = self.request.sampling.num_prompt_logprobs
        if wanted is None:
            return None
        tops = [(rank, -0.5 - rank) for rank in range(wanted)]
        return tuple(TokenLogprobs(-float(token_id), tuple(tops)) for token_id in self.request.prompt_ids[1:])

    def _logprobs(self, token_id: int) -> TokenLogprobs | None:
        wanted = self.request.sampling.num_logprobs
        if wanted is None:
            return None
        return TokenLogprobs(-0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(wanted)))


class FakeGenerationService:
    """Answers every submit by a script. One event loop only."""

    def __init__(self, statuses: Sequence[ModelStatus], script_for: ScriptFor = lambda request: Script()) -> None:
        self.statuses = tuple(statuses)
        self.script_for = script_for
        self.streams: list[FakeTokenStream] = []
        self.received_s: list[float | None] = []  # of each stream, as it was said
        self.submitted = asyncio.Event()
        self.counters = Counters()

    def submit(
        self, request: GenerateRequest, track: RequestTrack | None = None, received_s: float | None = None
    ) -> FakeTokenStream:
        if all(status.model != request.model for status in self.statuses):
            raise ModelNotFound(f"the model {request.model!r} has no workers", param="model")
        script = self.script_for(request)
        if script.refusal is not None:
            raise script.refusal
        stream = FakeTokenStream(RequestId(Incarnation(0xFA4E), len(self.streams)), request, script, track)
        self.received_s.append(received_s)
        self.streams.append(stream)
        self.submitted.set()
        return stream

    def models(self) -> tuple[ModelStatus, ...]:
        return self.statuses

    def count(self, metric: Metric, label: str) -> None:
        self.counters.add(metric, label=label)

    def metrics_text(self) -> bytes:
        return b"# HELP fake_submitted Requests that were submitted.\nfake_submitted %d\n" % len(self.streams)

    def cluster_json(self) -> bytes:
        return b'{"workers":[]}'

    def check_invariants(self) -> None:
        """Raises AssertionError when a stream was neither finished nor aborted."""
        for stream in self.streams:
            stream.check_invariants()
            assert stream.is_done or stream.num_aborts, f"stream {stream.request_id} was left open"
