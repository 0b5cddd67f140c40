"""The router's decisions for every open request.

  1. submit(): checked against the model's limits, admitted, written into the journal, placed; workers are told.
  2. Tokens come in by position from whoever computed them, repeats are dropped, the next in order are delivered.
  3. A choice ends by its last token, by a stop string, by a failure or because its client has gone; claims go back.

Views of workers are hints: what a worker answers decides.
"""

from collections.abc import Callable

import msgspec

from disagg.core.errors import (
    DisaggError,
    Failure,
    FailureKind,
    InternalFault,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PeerLost,
    TransferFailed,
    Unavailable,
)
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, FinishReason, SequenceSpec
from disagg.core.roles import Task
from disagg.dispatch.actions import Deliver, DispatchAction, RefuseWorker, SendToWorker
from disagg.dispatch.events import (
    ChoiceStopped,
    ClientGone,
    DispatchEvent,
    WorkerLost,
    WorkerMessageReceived,
    WorkerRegistered,
)
from disagg.dispatch.registry import Registry
from disagg.dispatch.stream import GenerateRequest, ModelStatus, RequestFailed, TokensDelivered
from disagg.policy.admission import default_max_tokens, impossible
from disagg.policy.routing import Demand, NoPlacement, Path, Placement, choose, what_is_missing
from disagg.protocol.journal import JournalEntry
from disagg.protocol.lifecycle import REQUEST_TABLE, RequestState, RequestTrigger
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    AnswerRegistration,
    EmitTokens,
    ReportFailure,
    ReportPairing,
    ReportState,
    StartSequence,
)
from disagg.protocol.table import Machine
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import (
    GENERATED_TOKENS,
    MESSAGES_IGNORED,
    PLACEMENTS,
    PROMPT_TOKENS,
    REJECTIONS,
    REQUESTS,
)

RETRY_AFTER_S = 1.0  # what a client is told when no worker can serve


class DispatcherConfig(msgspec.Struct, frozen=True):
    """What a router is told at its start."""

    incarnation: Incarnation
    tokenizer_digests: dict[str, str]  # by model name
    local_prefill_tokens: int = 512  # longest prompt that a decode worker reads itself; 0: never
    max_open_requests: int = 1024
    beat_interval_s: float = 0.5


class _Choice:
    """One sequence of an open request and who works on it."""

    def __init__(self, entry: JournalEntry, placement: Placement) -> None:
        self.entry = entry
        self.placement = placement
        self.is_over = False

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        prefill = self.placement.prefill
        return (self.placement.decode,) if prefill is None else (self.placement.decode, prefill)


class OpenRequest:
    """A request whose stream has not ended."""

    def __init__(self, request_id: RequestId) -> None:
        self.machine = Machine(REQUEST_TABLE, str(request_id))
        self.choices: list[_Choice] = []
        self.num_cached_tokens = 0

    @property
    def path(self) -> Path:
        return self.choices[0].placement.path


class Dispatcher:
    """All open requests and all registered workers of one router."""

    def __init__(self, config: DispatcherConfig) -> None:
        self.config = config
        self.counters = Counters()
        self.registry = Registry(config.tokenizer_digests)
        self._requests: dict[RequestId, OpenRequest] = {}
        self._next_number = 0
        self._actions: list[DispatchAction] = []
        self._handlers: dict[type, Callable[..., None]] = {
            WorkerRegistered: self._on_registered,
            WorkerLost: self._on_lost,
            WorkerMessageReceived: self._on_message,
            ChoiceStopped: self._on_choice_stopped,
            ClientGone: self._on_client_gone,
        }

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def open_request(self, request_id: RequestId) -> OpenRequest | None:
        return self._requests.get(request_id)

    def models(self) -> tuple[ModelStatus, ...]:
        statuses = []
        for model in self.registry.models:
            missing = what_is_missing(self.registry.views(model))
            refusals = [f.message for record in self.registry.records(model) for f in record.refusals.values()]
            if missing and refusals:
                missing = f"{missing}: {'; '.join(refusals)}"
            limits = self.registry.limits(model)
            statuses.append(ModelStatus(model, not missing, missing, limits.max_context if limits else None))
        return tuple(statuses)

    def handle(self, event: DispatchEvent) -> list[DispatchAction]:
        """Take one event in; give back what to do, in order."""
        self._handlers[type(event)](event)
        return self._take_actions()

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> tuple[RequestId, list[DispatchAction]]:
        """Open a request. Raises InvalidRequest, ModelNotFound, Unavailable or Overloaded, with nothing left behind."""
        request = self._checked(request)
        request_id = RequestId(self.config.incarnation, self._next_number)
        opened = OpenRequest(request_id)
        for index in range(request.num_choices):
            spec = SequenceSpec(
                SequenceId(request_id, index), request.prompt_ids, request.sampling, request.priority, request.slo_class
            )
            placement = self._place(request)
            choice = _Choice(JournalEntry(spec), placement)
            opened.choices.append(choice)
            self._claim(choice)
            self._start(choice)
        self._next_number += 1
        self._requests[request_id] = opened
        self.counters.add(PROMPT_TOKENS, len(request.prompt_ids))
        return request_id, self._take_actions()

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        if request.model not in self.registry.models:
            self.counters.add(REJECTIONS, label="model_not_found")
            known = ", ".join(self.registry.models)
            raise ModelNotFound(f"no model {request.model!r} is served here; there is {known}", code="model_not_found")
        if self.num_open >= self.config.max_open_requests:
            self.counters.add(REJECTIONS, label="too_many_requests")
            text = f"{self.num_open} requests are open, the limit is {self.config.max_open_requests}; try again later"
            raise Overloaded(text, retry_after_s=RETRY_AFTER_S)
        limits = self.registry.limits(request.model)
        if limits is None:
            raise self._unavailable(request.model)
        sampling = request.sampling
        if request.is_open_ended:
            most = default_max_tokens(len(request.prompt_ids), limits)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))
            request = msgspec.structs.replace(request, sampling=sampling)
        failure = impossible(len(request.prompt_ids), sampling.max_tokens, limits)
        if failure is not None:
            self.counters.add(REJECTIONS, label="impossible")
            raise InvalidRequest(failure.message, code="context_length_exceeded")
        return request

    def _place(self, request: GenerateRequest) -> Placement:
        num_prompt = len(request.prompt_ids)
        demand = Demand(num_prompt, num_prompt, num_prompt + request.sampling.max_tokens - 1)
        placement = choose(self.registry.views(request.model), demand, self.config.local_prefill_tokens)
        if isinstance(placement, NoPlacement):
            raise self._unavailable(request.model)
        self.counters.add(PLACEMENTS, label=placement.reason.value)
        return placement

    def _unavailable(self, model: str) -> Unavailable:
        self.counters.add(REJECTIONS, label="unavailable")
        missing = what_is_missing(self.registry.views(model))
        return Unavailable(f"model {model} cannot be served now: {missing}", retry_after_s=RETRY_AFTER_S)

    def _claim(self, choice: _Choice) -> None:
        spec, placement = choice.entry.spec, choice.placement
        decode = self.registry.get(placement.decode)
        reader = self.registry.get(placement.prefill or placement.decode)
        if decode is None or reader is None:
            raise InternalFault(f"placed on {choice.workers}, which are not registered")
        decode.claimed_blocks[spec.sequence_id] = -(-spec.max_total_tokens // decode.card.layout.block_size)
        reader.waiting_tokens[spec.sequence_id] = len(spec.prompt_ids)

    def _start(self, choice: _Choice) -> None:
        """Decode hears first, so that it expects the hand-off when prefill asks."""
        spec, placement = choice.entry.spec, choice.placement
        decode = self.registry.get(placement.decode)
        prefill = self.registry.get(placement.prefill) if placement.prefill is not None else None
        if decode is None or prefill is None:
            self._tell(placement.decode, StartSequence(spec, Task.WHOLE, attempt=1))
            return
        to_decode = StartSequence(spec, Task.DECODE, 1, prefill.card.worker_id, prefill.card.incarnation)
        to_prefill = StartSequence(spec, Task.PREFILL, 1, decode.card.worker_id, decode.card.incarnation)
        self._tell(decode.card.worker_id, to_decode)
        self._tell(prefill.card.worker_id, to_prefill)

    def _on_choice_stopped(self, event: ChoiceStopped) -> None:
        opened = self._requests.get(event.request_id)
        if opened is None or opened.choices[event.choice].is_over:
            return
        choice = opened.choices[event.choice]
        self._abort(choice, "a stop string was matched")
        choice.entry.finish = FinishReason.STOP
        self._end_choice(event.request_id, opened, choice)

    def _on_client_gone(self, event: ClientGone) -> None:
        opened = self._requests.get(event.request_id)
        if opened is None:
            return
        opened.machine.fire(RequestTrigger.CLIENT_GONE)
        self._close(event.request_id, opened, "the client has gone")

    def _end_choice(self, request_id: RequestId, opened: OpenRequest, choice: _Choice) -> None:
        choice.is_over = True
        self.registry.release(choice.entry.sequence_id, choice.workers)
        if all(each.is_over for each in opened.choices):
            opened.machine.fire(RequestTrigger.LAST_CHOICE_FINISHED)
            self._close(request_id, opened, "finished")

    def _fail(self, request_id: RequestId, opened: OpenRequest, error: DisaggError) -> None:
        opened.machine.fire(RequestTrigger.SEQUENCE_FAILED)
        self._actions.append(Deliver(request_id, RequestFailed(error)))
        self._close(request_id, opened, str(error))

    def _close(self, request_id: RequestId, opened: OpenRequest, reason: str) -> None:
        for choice in opened.choices:
            if not choice.is_over:
                self._abort(choice, reason)
                self.registry.release(choice.entry.sequence_id, choice.workers)
        self.counters.add(REQUESTS, label=opened.machine.state.value.lower())
        del self._requests[request_id]

    def _abort(self, choice: _Choice, reason: str) -> None:
        for worker_id in choice.workers:
            self._tell(worker_id, AbortSequence(choice.entry.sequence_id, reason))

    # --- workers -----------------------------------------------------------------------------------------------

    def _on_registered(self, event: WorkerRegistered) -> None:
        card = event.card
        failure = self.registry.refusal(card)
        answer = AnswerRegistration(self.config.incarnation, self.config.beat_interval_s, failure)
        if failure is not None:
            self._actions.append(RefuseWorker(card.worker_id, answer))
            return
        # The same process on a new connection: it dropped everything when it lost the old one.
        self._on_lost(WorkerLost(card.worker_id, card.incarnation, "it registered again"))
        self.registry.add(card)
        self._tell(card.worker_id, answer)
        self._announce()

    def _on_lost(self, event: WorkerLost) -> None:
        if not self.registry.remove(event.worker_id, event.incarnation):
            return
        for request_id, opened in list(self._requests.items()):
            # A lost prefill worker is the decode worker's to judge: it knows whether it has all it needs.
            if any(choice.placement.decode == event.worker_id and not choice.is_over for choice in opened.choices):
                error = PeerLost(f"worker {event.worker_id}, which was writing the answer, was lost: {event.reason}")
                self._fail(request_id, opened, error)
        self._announce()

    def _announce(self) -> None:
        for record in self.registry.records():
            peers = self.registry.peers_to_meet(record.card)
            self._tell(record.card.worker_id, AnnouncePeers(peers))

    def _on_message(self, event: WorkerMessageReceived) -> None:
        record = self.registry.get(event.worker_id)
        message = event.message
        if record is None or record.card.incarnation != event.incarnation:
            self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)
        elif isinstance(message, EmitTokens):
            self._on_tokens(event.worker_id, message)
        elif isinstance(message, ReportFailure):
            self._on_failure(message)
        elif isinstance(message, ReportState):
            record.state = message.state
        elif isinstance(message, ReportPairing):
            if message.failure is None:
                record.partners[message.peer] = message.peer_incarnation
                record.refusals.pop(message.peer, None)
            else:
                record.partners.pop(message.peer, None)
                record.refusals[message.peer] = message.failure

    def _on_tokens(self, worker_id: WorkerId, message: EmitTokens) -> None:
        for prompt in message.prompts:
            record = self.registry.get(worker_id)
            opened = self._requests.get(prompt.sequence_id.request_id)
            if record is not None:
                record.waiting_tokens.pop(prompt.sequence_id, None)
            if opened is not None:
                opened.num_cached_tokens = max(opened.num_cached_tokens, prompt.num_cached_tokens)
        by_sequence: dict[SequenceId, list[EmittedToken]] = {}
        for token in message.tokens:
            by_sequence.setdefault(token.sequence_id, []).append(token)
        for sequence_id, tokens in by_sequence.items():
            self._deliver(sequence_id, tokens)

    def _deliver(self, sequence_id: SequenceId, tokens: list[EmittedToken]) -> None:
        opened = self._requests.get(sequence_id.request_id)
        if opened is None:
            self.counters.add(MESSAGES_IGNORED, label="token")
            return
        choice = opened.choices[sequence_id.choice]
        fresh = [new for token in tokens for new in choice.entry.record(token)]
        if not fresh:
            return
        opened.machine.fire(RequestTrigger.TOKEN_RECEIVED)
        self.counters.add(GENERATED_TOKENS, len(fresh))
        delivered = TokensDelivered(sequence_id.choice, tuple(fresh), choice.entry.finish)
        self._actions.append(Deliver(sequence_id.request_id, delivered))
        if choice.entry.finish is not None:
            self._end_choice(sequence_id.request_id, opened, choice)

    def _on_failure(self, message: ReportFailure) -> None:
        request_id = message.sequence_id.request_id
        opened = self._requests.get(request_id)
        if opened is None or opened.choices[message.sequence_id.choice].is_over:
            self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)
            return
        self._fail(request_id, opened, error_of(message.failure))

    def _tell(
        self, worker_id: WorkerId, message: AnswerRegistration | AnnouncePeers | StartSequence | AbortSequence
    ) -> None:
        self._actions.append(SendToWorker(worker_id, message))

    def _take_actions(self) -> list[DispatchAction]:
        actions, self._actions = self._actions, []
        return actions

    def check_invariants(self) -> None:
        self.registry.check_invariants()
        self.counters.check_invariants()
        open_ids = set()
        for request_id, opened in self._requests.items():
            if opened.machine.state not in (RequestState.PLACED, RequestState.STREAMING):
                raise InternalFault(f"request {request_id} is {opened.machine.state} and still open")
            for choice in opened.choices:
                choice.entry.check_invariants()
                if not choice.is_over:
                    open_ids.add(choice.entry.sequence_id)
        for record in self.registry.records():
            stale = (record.claimed_blocks.keys() | record.waiting_tokens.keys()) - open_ids
            if stale:
                raise InternalFault(f"worker {record.card.worker_id} has claims of ended sequences: {sorted(stale)}")


def error_of(failure: Failure) -> DisaggError:
    """The exception that a failure on the wire stands for."""
    match failure.kind:
        case FailureKind.INVALID_REQUEST:
            return InvalidRequest(failure.message)
        case FailureKind.OVERLOADED:
            return Overloaded(failure.message, retry_after_s=RETRY_AFTER_S)
        case FailureKind.WORKER_LOST | FailureKind.LEASE_EXPIRED:
            return PeerLost(failure.message)
        case FailureKind.TRANSFER_FAILED | FailureKind.CANCELLED:
            return TransferFailed(failure.message)
        case _:
            return InternalFault(failure.message)
