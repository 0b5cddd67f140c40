"""The router's decisions for every open request.

  1. submit(): checked against the model's limits, admitted, written into the journal, placed; workers are told.
  2. Tokens come in by position from whoever computed them, repeats are dropped, the next in order are delivered.
  3. When a worker fails or is lost, the journal (prompt, parameters, seed, tokens so far) moves the choice elsewhere as
     the next attempt: the client sees a pause. Where nobody can take it, it waits for a worker, for a while.
  4. A choice ends by its last token, by a stop string, by a failure that no move cures, or because its client has gone.

Views of workers are hints: what a worker answers decides.
"""

from collections.abc import Callable, Iterable

from disagg.core.errors import DisaggError, Failure, FailureKind
from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, FinishReason
from disagg.dispatch.actions import Deliver, DispatchAction, LogDecision, RefuseWorker
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.decided import OnDecided, admission, recovery_of
from disagg.dispatch.events import (
    ChoiceStopped,
    ClientGone,
    DispatchEvent,
    DrainAsked,
    TimePassed,
    WorkerLost,
    WorkerMessageReceived,
    WorkerRegistered,
)
from disagg.dispatch.gate import Gate, error_of
from disagg.dispatch.open_request import Choice, OpenRequest
from disagg.dispatch.outgoing import Outgoing
from disagg.dispatch.placing import Placing
from disagg.dispatch.registry import Registry
from disagg.dispatch.request_table import RequestTable
from disagg.dispatch.starting import note_reports
from disagg.dispatch.stream import GenerateRequest, ModelStatus, RequestFailed, TokensDelivered
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.recovery import Verdict, after_failure, at_drain
from disagg.policy.routing import Placement
from disagg.protocol.lifecycle import ChoiceTrigger
from disagg.protocol.messages import (
    AnnouncePeers,
    AnswerRegistration,
    DrainWorker,
    EmitTokens,
    ReportFailure,
    ReportPairing,
    ReportState,
)
from disagg.telemetry.counters import Counters
from disagg.telemetry.decision_log import DecisionKind
from disagg.telemetry.metrics import GENERATED_TOKENS, MESSAGES_IGNORED, PROMPT_TOKENS, REQUESTS
from disagg.telemetry.track import RequestTrack


class Dispatcher:
    """All open requests and all registered workers of one router."""

    def __init__(self, config: DispatcherConfig, on_decided: OnDecided = lambda decision: None) -> None:
        self.config = config
        self._decided = on_decided
        self.counters = Counters()
        self.registry = Registry(config.tokenizer_digests, config.protocols)
        self._requests = RequestTable(config.recovery)
        self._gate = Gate(config, self.registry, self.counters)
        self._next_number = 0
        self._now_s = 0.0
        self._outgoing = Outgoing()
        self._placing = Placing(config, self.registry, self._requests, self._outgoing, self.counters, on_decided)
        self._handlers: dict[type, Callable[..., None]] = {
            WorkerRegistered: self._on_registered,
            WorkerLost: self._on_lost,
            WorkerMessageReceived: self._on_message,
            ChoiceStopped: self._on_choice_stopped,
            ClientGone: self._on_client_gone,
            DrainAsked: self._on_drain_asked,
            TimePassed: lambda event: None,
        }

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def open_requests(self) -> Iterable[OpenRequest]:
        return self._requests

    def open_request(self, request_id: RequestId) -> OpenRequest | None:
        return self._requests.get(request_id)

    def models(self) -> tuple[ModelStatus, ...]:
        return self._gate.statuses()

    def handle(self, event: DispatchEvent, now_s: float) -> list[DispatchAction]:
        """Take one event in; give back what to do, in order. now_s never goes back."""
        self._now_s = now_s
        self._handlers[type(event)](event)
        if not isinstance(event, WorkerMessageReceived) or not isinstance(event.message, EmitTokens):
            self._place_waiting()
        return self._outgoing.take()

    def next_wake_s(self) -> float:
        """When to send TimePassed if nothing else happens; infinity for never."""
        choices = [choice for opened in self._requests for choice in opened.choices]
        times = [min(self._deadline_s(each), each.judged_by_s(self.config.recovery)) for each in choices]
        return min(times, default=float("inf"))

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, now_s: float, track: RequestTrack | None = None
    ) -> tuple[RequestId, list[DispatchAction]]:
        """Open a request; what becomes of it goes into the track.

        Raises InvalidRequest, ModelNotFound, Unavailable or Overloaded, with nothing left behind.
        """
        self._now_s = now_s
        try:
            request = self._gate.checked(request, self.num_open, now_s)
        except DisaggError as error:
            self._decided(admission(self._next_number, error))
            raise
        self._decided(admission(self._next_number, None))
        request_id = RequestId(self.config.incarnation, self._next_number)
        self._next_number += 1
        opened = OpenRequest(request_id, request, now_s, track)
        self._requests.add(opened)
        self.counters.add(PROMPT_TOKENS, len(request.prompt_ids))
        for choice in opened.choices:
            self._try_place(opened, choice)
        return request_id, self._outgoing.take()

    def _on_choice_stopped(self, event: ChoiceStopped) -> None:
        opened = self._requests.get(event.request_id)
        if opened is None or not opened.choices[event.choice].is_open:
            return
        choice = opened.choices[event.choice]
        choice.entry.finish = FinishReason.STOP
        self._placing.abort(choice, "a stop string was matched")
        self._end_choice(opened, choice, prompt_due_s=self._now_s)

    def _on_client_gone(self, event: ClientGone) -> None:
        opened = self._requests.get(event.request_id)
        if opened is not None:
            self._end_all(opened, ChoiceTrigger.CLIENT_GONE, "the client has gone", "aborted")

    def _give_up(self, opened: OpenRequest, error: DisaggError) -> None:
        self._outgoing.act(Deliver(opened.request_id, RequestFailed(error)))
        self._end_all(opened, ChoiceTrigger.GIVEN_UP, str(error), "failed")

    def _end_all(self, opened: OpenRequest, trigger: ChoiceTrigger, reason: str, outcome: str) -> None:
        for choice in opened.choices:
            if choice.is_open:
                self._placing.abort(choice, reason)
                choice.end(trigger, self._now_s)
        self._close(opened, outcome)

    def _end_choice(self, opened: OpenRequest, choice: Choice, prompt_due_s: float) -> None:
        """Its answer has ended; until prompt_due_s its prompt may still get to where it was to be written."""
        choice.end(ChoiceTrigger.ANSWER_ENDED, self._now_s)
        self._requests.note(choice)
        self.registry.release(choice.sequence_id, choice.workers)
        for follower in choice.followers:
            follower.place_after_s = prompt_due_s
        if not any(each.is_open for each in opened.choices):
            self._close(opened, "finished")

    def _close(self, opened: OpenRequest, outcome: str) -> None:
        self.counters.add(REQUESTS, label=outcome)
        self._gate.note_ended(self._now_s)
        self._requests.remove(opened)

    # --- placement ---------------------------------------------------------------------------------------------

    def _place_waiting(self) -> None:
        """Everything that no worker has: place it, or give it up when its time is over."""
        for choice in self._requests.due(self._now_s):
            opened = self._requests.get(choice.sequence_id.request_id)
            if opened is None:
                continue  # it has ended with another of its choices
            if choice.judged_by_s(self.config.recovery) <= self._now_s:
                text = "its prefill worker was lost, and its decode worker has not heard of it"
                self._recover(opened, choice, Failure(FailureKind.WORKER_LOST, text))
            if choice.is_placed and self._deadline_s(choice) <= self._now_s:
                queued_s = self._now_s - choice.unplaced_since_s
                self._give_up(opened, self._gate.queued_too_long(queued_s, self.num_open, self._now_s))
            elif choice.is_due(self._now_s):
                self._try_place(opened, choice)

    def _try_place(self, opened: OpenRequest, choice: Choice) -> None:
        """The request may be over then: nobody could take this choice for too long."""
        given_up = self._placing.try_place(opened, choice, self._now_s)
        if given_up is not None:
            self._give_up(opened, given_up)

    def _deadline_s(self, choice: Choice) -> float:
        is_first = choice.is_placed and self.registry.is_first_to_read(choice.sequence_id, choice.workers[-1])
        return choice.deadline_s(self.config.recovery, is_first=is_first)

    # --- workers -----------------------------------------------------------------------------------------------

    def _on_registered(self, event: WorkerRegistered) -> None:
        card = event.card
        failure = self.registry.refusal(card)
        answer = AnswerRegistration(self.config.incarnation, failure)
        if failure is not None:
            self._outgoing.act(RefuseWorker(card.worker_id, answer))
            return
        self._outgoing.tell(card.worker_id, answer)
        # The same process on a new connection: it dropped everything when it lost the old one.
        self._on_lost(WorkerLost(card.worker_id, card.incarnation, "it registered again"))
        self.registry.add(card, is_draining=event.is_draining)
        self._announce()
        self._gate.note_ready(card.pool.model)

    def _on_lost(self, event: WorkerLost) -> None:
        if not self.registry.remove(event.worker_id, event.incarnation):
            return
        for opened in self._requests:
            for choice in opened.choices:
                if choice.lose_reader(event.worker_id, self._now_s):
                    self._requests.note(choice)
                choice.forget_kv_of(event.worker_id)
        # A lost prefill worker is the decode worker's to judge: it knows whether it has all it needs.
        for opened, choice in self._requests.written_by(event.worker_id):
            text = f"worker {event.worker_id}, which was writing the answer, was lost: {event.reason}"
            self._recover(opened, choice, Failure(FailureKind.WORKER_LOST, text))
        self._announce()

    def _recover(self, opened: OpenRequest, choice: Choice, failure: Failure) -> None:
        if not choice.is_placed:  # another choice's failure has ended the request
            return
        recovery = after_failure(failure.kind, failure.message, choice.attempt, self.config.recovery)
        self._decided(recovery_of(DecisionKind.RECOVERY, choice, recovery))
        if recovery.verdict is Verdict.MOVE:
            self._placing.move(choice, recovery.reason, failure.kind.value, self._now_s)
            choice.place_after_s = self._now_s + recovery.delay_s
        else:
            self._give_up(opened, error_of(failure, recovery))

    def _announce(self) -> None:
        for record in self.registry.records():
            self._outgoing.tell(record.card.worker_id, AnnouncePeers(self.registry.peers_to_meet(record.card)))

    def _on_message(self, event: WorkerMessageReceived) -> None:
        record = self.registry.get(event.worker_id)
        message = event.message
        if record is None or record.card.incarnation != event.incarnation:
            self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)
        elif isinstance(message, EmitTokens):
            self._on_tokens(record, message)
        elif isinstance(message, ReportFailure):
            self._on_failure(record, message)
        elif isinstance(message, ReportState):
            record.state = message.state
            if message.is_draining and not record.is_draining:
                self._start_drain(record)
        elif isinstance(message, ReportPairing):
            if message.failure is None:
                record.pair(message.peer, message.peer_incarnation)
                self._gate.note_ready(record.card.pool.model)
            else:
                record.unpair(message.peer)
                record.refusals[message.peer] = message.failure

    def _on_drain_asked(self, event: DrainAsked) -> None:
        record = self.registry.get(event.worker_id)
        if record is not None and not record.is_draining:
            self._outgoing.tell(event.worker_id, DrainWorker())
            self._start_drain(record)

    def _start_drain(self, record: WorkerRecord) -> None:
        """No new work; long answers go elsewhere, short ones end here."""
        record.drain()
        self._outgoing.act(LogDecision(f"worker {record.card.worker_id} drains"))
        for opened, choice in self._requests.written_by(record.card.worker_id):
            is_elsewhere = isinstance(self._placing.choose(opened, choice), Placement)
            limits = self.config.recovery
            recovery = at_drain(choice.num_remaining_tokens, has_other_worker=is_elsewhere, limits=limits)
            self._decided(recovery_of(DecisionKind.DRAIN, choice, recovery))
            if recovery.verdict is Verdict.MOVE:
                self._placing.move(choice, recovery.reason, "drain", self._now_s)

    def _on_tokens(self, record: WorkerRecord, message: EmitTokens) -> None:
        worker_id, revision = record.card.worker_id, record.card.pool.revision
        note_reports(message, record, self._requests.choice, self.counters)
        by_sequence: dict[SequenceId, list[EmittedToken]] = {}
        last, own = None, list[EmittedToken]()
        for token in message.tokens:
            if token.sequence_id is not last:  # a message may bring many of one
                last = token.sequence_id
                own = by_sequence.setdefault(last, [])
            own.append(token)
        num_fresh = 0
        for sequence_id, tokens in by_sequence.items():
            choice = self._requests.choice(sequence_id)
            if choice is not None and choice.followers and worker_id == choice.workers[0]:
                self._placing.start_followers(self._requests[sequence_id.request_id], choice, record, self._now_s)
            if choice is None or not choice.is_open or worker_id not in choice.workers:
                self.counters.add(MESSAGES_IGNORED, label="token")
            else:
                choice.revision = revision
                num_fresh += self._deliver(choice, worker_id, tokens)
        if num_fresh:
            self.counters.add(GENERATED_TOKENS, num_fresh)

    def _deliver(self, choice: Choice, worker_id: WorkerId, tokens: list[EmittedToken]) -> int:
        """Hand on those that are new and in order now. Gives their number."""
        was_answering = choice.is_answering
        fresh = choice.take(tokens, worker_id, self._now_s)
        if not fresh:
            return 0
        if not was_answering:
            self._requests.note(choice)
        request_id, finish = choice.sequence_id.request_id, choice.entry.finish
        delivered = TokensDelivered(choice.sequence_id.choice, tuple(fresh), finish)
        self._outgoing.act(Deliver(request_id, delivered))
        if finish is not None:
            self._end_choice(self._requests[request_id], choice, self._now_s + self.config.recovery.max_judging_s)
        return len(fresh)

    def _on_failure(self, record: WorkerRecord, message: ReportFailure) -> None:
        worker_id = record.card.worker_id
        choice = self._requests.choice(message.sequence_id)
        is_at_work = choice is not None and choice.is_placed and worker_id in choice.workers
        if choice is None or not is_at_work or choice.attempt != message.attempt:
            self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)
            return
        if choice.placement is not None and worker_id == choice.placement.decode:
            choice.kept_on, choice.num_kept_tokens = worker_id, message.num_kept_tokens
        if message.failure.kind is FailureKind.WORKER_LOST:
            self._doubt_pairing(choice)
        elif message.failure.kind in (FailureKind.INTERNAL, FailureKind.TRANSFER_FAILED, FailureKind.WRONG_ROLE):
            choice.failed_workers.add(worker_id)
        self._recover(self._requests[message.sequence_id.request_id], choice, message.failure)

    def _doubt_pairing(self, choice: Choice) -> None:
        """One end has lost the other. Not used until the source has said again how it stands: it is asked to."""
        placement = choice.placement
        source = self.registry.get(placement.prefill) if placement is not None and placement.prefill else None
        if placement is not None and source is not None:
            source.unpair(placement.decode)
            self._outgoing.tell(source.card.worker_id, AnnouncePeers(self.registry.peers_to_meet(source.card)))

    def check_invariants(self) -> None:
        self.registry.check_invariants()
        self.counters.check_invariants()
        self._gate.check_invariants()
        self._requests.check_invariants()
        choices = (choice for opened in self._requests for choice in opened.choices)
        self.registry.check_claims({choice.sequence_id for choice in choices if choice.is_placed})
