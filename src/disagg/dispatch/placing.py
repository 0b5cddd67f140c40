"""Where choices go: when they are new, after a failure, from a worker that drains.

A choice goes to the workers that routing names, waits for a worker, or waits for the prompt that another choice of its
request brings (`following.py`). Room is claimed and workers are told; when it leaves them they are told to drop it.
"""

from disagg.core.errors import Unavailable
from disagg.dispatch.actions import LogDecision
from disagg.dispatch.config import RETRY_AFTER_S, DispatcherConfig
from disagg.dispatch.decided import OnDecided, following, placement_of, recovery_of
from disagg.dispatch.following import find_leader, part_unless_shared, shared_placement
from disagg.dispatch.open_request import Choice, OpenRequest
from disagg.dispatch.outgoing import Outgoing
from disagg.dispatch.registry import Registry
from disagg.dispatch.request_table import RequestTable
from disagg.dispatch.starting import claim, start_messages
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.recovery import Verdict, while_unplaced
from disagg.policy.routing import NoPlacement, Placement, choose
from disagg.protocol.lifecycle import ChoiceTrigger
from disagg.protocol.messages import AbortSequence
from disagg.telemetry.counters import Counters
from disagg.telemetry.decision_log import DecisionKind
from disagg.telemetry.metrics import MOVES, PLACEMENTS


class Placing:
    """Of the choices in `requests`, on the workers in `registry`."""

    def __init__(
        self,
        config: DispatcherConfig,
        registry: Registry,
        requests: RequestTable,
        outgoing: Outgoing,
        counters: Counters,
        on_decided: OnDecided,
    ) -> None:
        self._config = config
        self._registry = registry
        self._requests = requests
        self._outgoing = outgoing
        self._counters = counters
        self._decided = on_decided

    def choose(self, opened: OpenRequest, choice: Choice) -> Placement | NoPlacement:
        """Where it would go by itself; changes nothing."""
        views = self._registry.views(opened.model, choice.revision)
        return choose(views, choice.demand(), self._config.local_prefill_tokens)

    def try_place(self, opened: OpenRequest, choice: Choice, now_s: float) -> Unavailable | None:
        """One that no worker has. Gives why its request is over, when nobody could take it for too long."""
        choice.unfollow(now_s)
        placement = self.choose(opened, choice)
        leader = find_leader(self._registry, opened, choice, placement)
        if leader is not None:
            self._decided(following(choice, leader))
            choice.follow(leader)
            claim(self._registry, leader)
            return None
        self._decided(placement_of(choice, placement))
        if isinstance(placement, Placement):
            self._place(choice, placement, now_s)
            return None
        choice.place_after_s = choice.unplaced_since_s  # whoever comes takes it
        recovery = while_unplaced(now_s - choice.unplaced_since_s, placement.missing, self._config.recovery)
        if recovery.verdict is not Verdict.GIVE_UP:
            return None
        self._decided(recovery_of(DecisionKind.WAITING, choice, recovery))
        why = f"{choice.last_reason}; {recovery.reason}" if choice.last_reason else recovery.reason
        return Unavailable(why, retry_after_s=RETRY_AFTER_S)

    def start_followers(self, opened: OpenRequest, leader: Choice, record: WorkerRecord, now_s: float) -> None:
        """Their prompt is there. On a worker that drains they stay only if nobody else could take them."""
        for follower in tuple(leader.followers):
            follower.unfollow(now_s)
            if record.is_draining and isinstance(self.choose(opened, follower), Placement):
                self.try_place(opened, follower, now_s)
                continue
            shared = shared_placement(record, follower)
            self._decided(placement_of(follower, shared))
            self._place(follower, shared, now_s)
        if leader.is_placed:
            claim(self._registry, leader)

    def move(self, choice: Choice, reason: str, label: str, now_s: float) -> None:
        """Take it from its workers; it is to be placed again. label: of the metric of moves."""
        text = f"moving {choice.sequence_id} after {len(choice.entry.tokens)} tokens: {reason}"
        self._outgoing.act(LogDecision(text))
        self._counters.add(MOVES, label=label)
        self.abort(choice, reason)
        choice.leave(reason, label, now_s)
        self._requests.note(choice)

    def abort(self, choice: Choice, reason: str) -> None:
        """Its workers drop it, and what was promised for it is free again."""
        for worker_id in choice.workers:
            self._outgoing.tell(worker_id, AbortSequence(choice.sequence_id, choice.attempt, reason))
        self._registry.release(choice.sequence_id, choice.workers)

    def _place(self, choice: Choice, placement: Placement, now_s: float) -> None:
        choice.place(placement, now_s)
        choice.machine.fire(ChoiceTrigger.WORKERS_TOLD)
        self._requests.note(choice)
        part_unless_shared(self._registry, choice, now_s)
        self._counters.add(PLACEMENTS, label=placement.reason.value)
        claim(self._registry, choice)
        for worker_id, message in start_messages(self._registry, choice, now_s):
            self._outgoing.tell(worker_id, message)
