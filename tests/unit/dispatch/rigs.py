"""A dispatcher whose workers are the test."""

from typing import TypeVar

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import Failure
from disagg.core.ids import HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout
from disagg.dispatch.actions import Deliver, DispatchAction, LogDecision, RefuseWorker, SendToWorker
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.events import DispatchEvent, TimePassed, WorkerLost, WorkerMessageReceived, WorkerRegistered
from disagg.dispatch.open_request import Choice
from disagg.dispatch.stream import GenerateRequest, RequestFailed, StreamEvent, TokensDelivered
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import (
    EmitTokens,
    PromptReport,
    ReportPairing,
    WorkerToRouter,
)

M = TypeVar("M")

MODEL = "model"
ROUTER = Incarnation(5)
BLOCK = 4


def card(
    name: str,
    role: Role,
    *,
    incarnation: int = 1,
    num_blocks: int = 100,
    model: str = MODEL,
    tokenizer: str = "tok",
    max_context: int = 200,
) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        pool=PoolCard(model, "weights", tokenizer, Numerics.EXACT, vocab_size=1000, max_context=max_context),
        layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=BLOCK),
        num_blocks=num_blocks,
        control_address=f"{name}:1",
        data_endpoints=(Endpoint(TransportKind.IN_PROCESS, name),),
    )


class Desk:
    """Drives one dispatcher and checks its invariants after every event."""

    def __init__(
        self,
        *,
        local_prefill_tokens: int = 0,
        max_open_requests: int = 100,
        max_claimed_share: float = 8.0,
        recovery: RecoveryLimits | None = None,
    ) -> None:
        self.now_s = 1000.0
        self.dispatcher = Dispatcher(
            DispatcherConfig(
                incarnation=ROUTER,
                tokenizer_digests={MODEL: "tok", "other": "tok"},
                local_prefill_tokens=local_prefill_tokens,
                max_open_requests=max_open_requests,
                max_claimed_share=max_claimed_share,
                recovery=recovery or RecoveryLimits(),
            )
        )

    def handle(self, event: DispatchEvent) -> list[DispatchAction]:
        actions = self.dispatcher.handle(event, self.now_s)
        self.dispatcher.check_invariants()
        return actions

    def wait(self, seconds: float) -> list[DispatchAction]:
        """Let time pass."""
        self.now_s += seconds
        return self.handle(TimePassed())

    def register(self, worker: WorkerCard, *, is_draining: bool = False) -> list[DispatchAction]:
        return self.handle(WorkerRegistered(worker, is_draining))

    def hear(self, name: str, message: WorkerToRouter, incarnation: int = 1) -> list[DispatchAction]:
        return self.handle(WorkerMessageReceived(WorkerId(name), Incarnation(incarnation), message))

    def lose(self, name: str, incarnation: int = 1) -> list[DispatchAction]:
        return self.handle(WorkerLost(WorkerId(name), Incarnation(incarnation), "its connection ended"))

    def pair(self, source: str, target: str, *, target_incarnation: int = 1, failure: Failure | None = None) -> None:
        self.hear(source, ReportPairing(WorkerId(target), Incarnation(target_incarnation), failure))

    def with_pair(self, num_blocks: int = 100) -> "Desk":
        """One prefill and one decode worker that have paired."""
        self.register(card("p0", Role.PREFILL))
        self.register(card("d0", Role.DECODE, num_blocks=num_blocks))
        self.pair("p0", "d0")
        return self

    def submit(
        self, num_prompt: int = 10, max_tokens: int = 4, *, num_choices: int = 1, stops: tuple[int, ...] = ()
    ) -> tuple[RequestId, list[DispatchAction]]:
        sampling = SamplingParams(max_tokens, stop_token_ids=stops)
        request = GenerateRequest(MODEL, tuple(range(num_prompt)), sampling, num_choices)
        request_id, actions = self.dispatcher.submit(request, self.now_s)
        self.dispatcher.check_invariants()
        return request_id, actions

    def emit(
        self, name: str, request_id: RequestId, position: int, token_id: int = 9, choice: int = 0
    ) -> list[DispatchAction]:
        return self.hear(name, EmitTokens((EmittedToken(SequenceId(request_id, choice), position, token_id),)))

    def read(
        self, name: str, request_id: RequestId, num_cached: int = 0, choice: int = 0, attempt: int = 1
    ) -> list[DispatchAction]:
        """The prompt has been read there."""
        report = PromptReport(HandoffId(SequenceId(request_id, choice), attempt), num_cached, 10 - num_cached)
        return self.hear(name, EmitTokens((), (report,)))

    def choice(self, request_id: RequestId, choice: int = 0) -> Choice:
        opened = self.dispatcher.open_request(request_id)
        assert opened is not None
        return opened.choices[choice]

    @property
    def is_ready(self) -> bool:
        return self.dispatcher.models()[0].is_ready

    @property
    def missing(self) -> str:
        return self.dispatcher.models()[0].missing

    def claims(self) -> dict[str, tuple[int, int]]:
        """By worker: blocks claimed for answers, prompt tokens waiting."""
        return {
            view.worker_id: (view.num_claimed_blocks, view.num_waiting_tokens)
            for view in self.dispatcher.registry.views(MODEL)
        }


def sent(kind: type[M], actions: list[DispatchAction]) -> list[tuple[str, M]]:
    return [
        (action.worker_id, action.message)
        for action in actions
        if isinstance(action, SendToWorker | RefuseWorker) and isinstance(action.message, kind)
    ]


def events_of(actions: list[DispatchAction]) -> list[StreamEvent]:
    return [action.event for action in actions if isinstance(action, Deliver)]


def tokens_of(actions: list[DispatchAction]) -> list[int]:
    return [
        token.position for event in events_of(actions) if isinstance(event, TokensDelivered) for token in event.tokens
    ]


def decisions(actions: list[DispatchAction]) -> list[str]:
    return [action.text for action in actions if isinstance(action, LogDecision)]


def error_in(actions: list[DispatchAction]) -> Exception:
    (event,) = [event for event in events_of(actions) if isinstance(event, RequestFailed)]
    return event.error
