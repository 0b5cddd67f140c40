"""One client request while it is open: its choices, who works on each, and what became of them."""

from collections.abc import Sequence

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SequenceSpec
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.recovery import RecoveryLimits, queue_limit_s
from disagg.policy.routing import Demand, Path, Placement
from disagg.protocol.journal import JournalEntry
from disagg.protocol.lifecycle import CHOICE_TABLE, ChoiceState, ChoiceTrigger
from disagg.protocol.table import Machine
from disagg.telemetry.track import NUM_TIMED, ChoiceTrack, RequestTrack

_OPEN = (ChoiceState.UNPLACED, ChoiceState.PLACED)


class Choice:
    """One sequence: its journal entry, where it is placed, and what failed it before."""

    def __init__(self, spec: SequenceSpec, now_s: float) -> None:
        self.sequence_id = spec.sequence_id
        self.entry = JournalEntry(spec)
        self.machine = Machine(CHOICE_TABLE, spec.sequence_id)
        self.placement: Placement | None = None
        self.workers: tuple[WorkerId, ...] = ()  # of this placement: who writes, then who reads for it
        self.attempt = 0
        self.unplaced_since_s = now_s
        self.place_after_s = now_s
        self.is_answering = False  # a token of this attempt has come
        self.reader_lost_s = float("inf")  # since when its prefill worker is gone; before it was answering
        self.last_reason = ""  # why it was moved
        self.revision: tuple[str, str] | None = None  # of the weights that began the answer: no others continue it
        self.num_cached_tokens = 0
        self.leader: Choice | None = None  # it waits for that one's prompt (dispatch/following.py)
        self.followers: list[Choice] = []  # they wait for this one's
        self.track: ChoiceTrack | None = None  # where its time goes, if somebody wants to know
        # Hints for the next attempt.
        self.failed_workers: set[WorkerId] = set()
        self.kept_on: WorkerId | None = None
        self.num_kept_tokens = 0
        self.read_by: WorkerId | None = None  # a prefill worker whose prefix index has the prompt

    @property
    def is_open(self) -> bool:
        return self.machine.state in _OPEN

    @property
    def is_placed(self) -> bool:
        return self.machine.state is ChoiceState.PLACED

    @property
    def emitted_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.entry.tokens)

    @property
    def num_remaining_tokens(self) -> int:
        return self.entry.spec.sampling.max_tokens - len(self.entry.tokens)

    def forget_kv_of(self, worker_id: WorkerId) -> None:
        """The process is gone: another one under its name has none of it."""
        if self.kept_on == worker_id:
            self.kept_on, self.num_kept_tokens = None, 0
        if self.read_by == worker_id:
            self.read_by = None

    def follow(self, leader: "Choice") -> None:
        """Wait until the leader's prompt is where it is written; the leader's deadlines are its own."""
        self.leader = leader
        leader.followers.append(self)
        self.place_after_s = float("inf")

    def unfollow(self, now_s: float) -> None:
        """It waits for nobody's prompt any more: it is to be placed."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
            self.unplaced_since_s = self.place_after_s = now_s

    def place(self, placement: Placement, now_s: float) -> None:
        """The next attempt begins."""
        self.attempt += 1
        self.placement = placement
        self.workers = tuple(each for each in (placement.decode, placement.prefill) if each is not None)
        self.unplaced_since_s = now_s
        self.is_answering = False
        self.reader_lost_s = float("inf")

    def leave(self, reason: str, cause: str, now_s: float) -> None:
        """Its attempt is over; another one is due."""
        self.machine.fire(ChoiceTrigger.WORKER_FAILED)
        self.last_reason = reason
        self.unplaced_since_s = now_s
        if self.track is not None:
            self.track.leave(cause, now_s)

    def take(self, tokens: Sequence[EmittedToken], worker_id: WorkerId, now_s: float) -> list[EmittedToken]:
        """Those that are new and in order now."""
        fresh = self.entry.record_all(tokens)
        if fresh:
            self.is_answering = True
            if self.track is not None and fresh[0].position < NUM_TIMED:
                self.track.arrive(worker_id, fresh[0].position, len(fresh), now_s)
        return fresh

    def end(self, trigger: ChoiceTrigger, now_s: float) -> None:
        """Nothing follows."""
        state = self.machine.fire(trigger)
        if self.track is not None:
            self.track.end(state.value.lower(), len(self.entry.tokens), now_s)

    def lose_reader(self, worker_id: WorkerId, now_s: float) -> bool:
        """Its decode worker judges what that means; unless it has never heard of the hand-off and waits for it.

        False when it was not its reader, or is not any more.
        """
        reader = self.placement.prefill if self.placement is not None and self.is_placed else None
        if reader != worker_id or self.is_answering:
            return False
        self.reader_lost_s = min(self.reader_lost_s, now_s)
        return True

    def is_due(self, now_s: float) -> bool:
        """Waits for a worker, and not for its links to heal."""
        return self.is_open and not self.is_placed and self.place_after_s <= now_s

    def judged_by_s(self, limits: RecoveryLimits) -> float:
        """When it is moved, if its reader is lost and nothing was heard of its writer until then."""
        is_judging = self.is_placed and not self.is_answering
        return self.reader_lost_s + limits.max_judging_s if is_judging else float("inf")

    def deadline_s(self, limits: RecoveryLimits, *, is_first: bool) -> float:
        """When it is given up if nothing happens until then. is_first: its reader has nothing older to read."""
        if not self.is_open or (self.is_placed and self.entry.tokens):
            return float("inf")
        if not self.is_placed and self.place_after_s > self.unplaced_since_s:
            return self.place_after_s
        limit_s = queue_limit_s(limits, is_first=is_first) if self.is_placed else limits.max_unplaced_s
        return self.unplaced_since_s + limit_s

    def demand(self) -> Demand:
        spec = self.entry.spec
        num_to_read = len(spec.prompt_ids) + len(self.entry.tokens)
        return Demand(
            num_prompt_tokens=num_to_read,
            num_uncached_tokens=num_to_read - self.num_kept_tokens,
            num_total_tokens=spec.max_total_tokens,
            preferred_decode=self.kept_on,
            preferred_prefill=self.read_by,
            excluded=frozenset(self.failed_workers),
        )


class OpenRequest:
    """A request whose stream has not ended."""

    def __init__(
        self, request_id: RequestId, request: GenerateRequest, now_s: float, track: RequestTrack | None = None
    ) -> None:
        self.request_id = request_id
        self.model = request.model
        # The choices have one prompt: the first one gives what is asked about it.
        unscored = msgspec.structs.replace(request.sampling, num_prompt_logprobs=None)
        self.choices = tuple(
            Choice(
                SequenceSpec(
                    SequenceId(request_id, index),
                    request.prompt_ids,
                    request.sampling if index == 0 else unscored,
                    request.priority,
                    request.tenant,
                    request.cache_salt,
                ),
                now_s,
            )
            for index in range(request.num_choices)
        )
        if track is not None:
            track.name = str(request_id)
            for choice, of_choice in zip(self.choices, track.choices, strict=True):
                choice.track = of_choice

    @property
    def path(self) -> Path:
        """Of the first attempt of the first choice, or MIXED before there is one."""
        placement = self.choices[0].placement
        return placement.path if placement is not None else Path.MIXED

    @property
    def num_unplaced(self) -> int:
        """Choices that no worker has."""
        return sum(each.is_open and not each.is_placed for each in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        # What a later choice finds cached may be what the first one has computed.
        return self.choices[0].num_cached_tokens

    def check_invariants(self) -> None:
        if not any(choice.is_open for choice in self.choices):
            raise InternalFault(f"request {self.request_id} is open, its choices are not")
        for choice in self.choices:
            choice.entry.check_invariants()
            if choice.is_placed and choice.placement is None:
                raise InternalFault(f"{choice.sequence_id} is placed nowhere")
            if choice.leader is not None and (choice.is_placed or choice not in choice.leader.followers):
                raise InternalFault(f"{choice.sequence_id} is placed and waits, or is not known to whom it waits for")
            if not choice.is_open and any(each.place_after_s == float("inf") for each in choice.followers):
                raise InternalFault(f"{choice.sequence_id} has ended, and others wait for it without end")
