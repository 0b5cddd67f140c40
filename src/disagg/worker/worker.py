"""One worker: the only thread that touches the scheduler, and the threads that work for it.

1. Everything that happens becomes an event: messages, finished steps, landed bytes, time. Threads post theirs.
2. The event loop's thread hands each event to the scheduler and carries out the actions it returns, in order.
3. Steps run on one step thread, bytes move on the transport's threads; neither touches scheduler state.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from disagg.core.endpoints import TransportKind
from disagg.core.errors import DisaggError, Failure, FailureKind, InternalFault, InvalidRequest
from disagg.core.ids import WorkerId
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import LinkState, ReportState, WorkerState, WorkerToRouter, WorkerToWorker
from disagg.scheduler.actions import (
    Action,
    OpenGrant,
    PrepareGrammar,
    PushSpan,
    RevokeGrant,
    RunStep,
    SendToPeer,
    SendToRouter,
    StopPushes,
)
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import Engine, OnLayers, StepPlan
from disagg.scheduler.events import (
    ClockTicked,
    DrainRequested,
    Event,
    GrammarPrepared,
    LayersComputed,
    StepFailed,
    StepFinished,
)
from disagg.scheduler.scheduler import Scheduler
from disagg.worker.courier import Courier
from disagg.worker.watchdog import Watchdog

_log = logging.getLogger(__name__)


class Worker:
    """Owns scheduler, step thread and courier. Links to router and peers are given their say by callbacks."""

    def __init__(
        self, config: SchedulerConfig, engine: Engine, courier: Courier, watchdog: Watchdog | None = None
    ) -> None:
        self.scheduler = Scheduler(config)
        self._watchdog = watchdog
        self.courier = courier
        self._engine = engine
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._wake_s = 0.0  # when the timer goes off
        self._send_to_router: Callable[[WorkerToRouter], None] | None = None
        self._peers: dict[WorkerId, Callable[[WorkerToWorker], None]] = {}
        self._is_closed = False
        self.link_states: Callable[[], tuple[LinkState, ...]] = lambda: ()  # of paired peers, without what was learned
        self._perform: dict[type, Callable[..., None]] = {
            SendToRouter: self._tell_router,
            SendToPeer: self._tell_peer,
            RunStep: self._run_step,
            PrepareGrammar: self._prepare_grammar,
            OpenGrant: courier.open_grant,
            RevokeGrant: courier.revoke_grant,
            PushSpan: courier.push,
            StopPushes: courier.stop_pushes,
        }
        courier.start(self.post)

    def post(self, event: Event) -> None:
        """Take an event from any thread; returns at once. Dropped once the worker is closed."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self.handle, event)

    def handle(self, event: Event) -> None:
        """Take an event on the loop's thread and do what follows from it.

        A fault of ours leaves the scheduler half way: the worker stops here and `ended` tells why.
        """
        if self._is_closed:
            return
        try:
            actions: list[Action] = self.scheduler.handle(event, time.monotonic())
            for action in actions:
                self._perform[type(action)](action)
        except Exception as error:
            _log.exception("%s could not be handled", type(event).__name__)
            self._is_closed = True
            self._ended.set_exception(InternalFault(f"{type(event).__name__} could not be handled: {error}"))
            return
        if self.scheduler.is_draining and self.scheduler.is_idle and not self._ended.done():
            self._ended.set_result(None)
        self._set_timer()

    # --- links -------------------------------------------------------------------------------------------------

    def attach_router(self, send: Callable[[WorkerToRouter], None] | None) -> None:
        """Where messages to the router go; None while there is none."""
        self._send_to_router = send

    def attach_peer(self, card: WorkerCard, send: Callable[[WorkerToWorker], None], kind: TransportKind) -> None:
        """`kind` carries KV to it."""
        self._peers[card.worker_id] = send
        self.courier.connect(card, kind)

    def detach_peer(self, worker_id: WorkerId) -> None:
        self._peers.pop(worker_id, None)
        self.courier.disconnect(worker_id)

    def drain(self) -> None:
        """Take no new work from now on, and let the router know. Idempotent."""
        if not self.scheduler.is_draining:
            self.handle(DrainRequested())
            self.report_state()

    async def ended(self) -> None:
        """Completes when a drain was asked for, here or by the router, and nothing is left. Raises InternalFault."""
        await asyncio.shield(self._ended)

    def report_state(self) -> None:
        """Also the loop's sign of life for the watchdog."""
        if self._watchdog is not None:
            self._watchdog.stamp_loop()
        report = ReportState(self.state(), self.scheduler.is_draining)
        self._tell_router(SendToRouter(report))

    def state(self) -> WorkerState:
        """What others are told of it."""
        state = self.scheduler.snapshot()
        return msgspec.structs.replace(state, links=_joined(self.link_states(), state.links))

    async def close(self) -> None:
        """Stop the step thread and the transport. A step that runs is waited for: it cannot be interrupted."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._loop.run_in_executor(None, self._steps.shutdown)
        await self._loop.run_in_executor(None, lambda: self._grammars.shutdown(cancel_futures=True))
        await self._loop.run_in_executor(None, self.courier.close)
        if self._watchdog is not None:
            self._watchdog.close()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.courier.check_invariants()

    # --- actions -----------------------------------------------------------------------------------------------

    def _tell_router(self, action: SendToRouter) -> None:
        if self._send_to_router is not None:
            self._send_to_router(action.message)

    def _tell_peer(self, action: SendToPeer) -> None:
        send = self._peers.get(action.peer)
        if send is not None:
            send(action.message)

    def _run_step(self, action: RunStep) -> None:
        self._steps.submit(self._step, action.plan)

    def _step(self, plan: StepPlan) -> None:
        """On the step thread."""
        started_s = time.perf_counter()
        try:
            self._stamp()
            result = self._engine.run_step(plan, self._on_layers(plan))
        except Exception as error:  # whatever the engine raises ends this step's sequences, not the worker
            _log.exception("step %d failed", plan.step_id)
            failure = Failure(FailureKind.INTERNAL, f"step {plan.step_id} failed: {type(error).__name__}: {error}")
            self.post(StepFailed(plan.step_id, failure))
        else:
            self.post(StepFinished(result, time.perf_counter() - started_s))
        finally:
            if self._watchdog is not None:
                self._watchdog.end_step()

    def _prepare_grammar(self, action: PrepareGrammar) -> None:
        self._grammars.submit(self._prepare, action)

    def _prepare(self, action: PrepareGrammar) -> None:
        """On the thread that prepares grammars."""
        failure: Failure | None = None
        try:
            self._engine.prepare_grammar(action.attempt_id, action.grammar, action.emitted_ids)
        except InvalidRequest as error:
            failure = Failure(FailureKind.INVALID_REQUEST, str(error))
        except Exception as error:  # ends this sequence, not the worker
            if not isinstance(error, DisaggError):
                _log.exception("the grammar of %s could not be prepared", action.attempt_id)
            failure = Failure(FailureKind.INTERNAL, f"its grammar could not be prepared: {error}")
        self.post(GrammarPrepared(action.attempt_id, failure))

    def _on_layers(self, plan: StepPlan) -> OnLayers:
        def on_layers(num_layers: int) -> None:
            self._stamp()
            if plan.is_reported(num_layers, self._engine.layout.num_layers):
                self.post(LayersComputed(plan.step_id, num_layers))

        return on_layers

    def _stamp(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stamp_step()

    # --- time --------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Only ever brought forward: events in every turn of the loop must not put the clock off."""
        wake_s = self.scheduler.next_wake_s()
        if wake_s == float("inf") or (self._timer is not None and self._wake_s <= wake_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_s = wake_s
        self._timer = self._loop.call_later(max(0.0, wake_s - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(ClockTicked())


def _joined(paired: tuple[LinkState, ...], learned: tuple[LinkState, ...]) -> tuple[LinkState, ...]:
    """What is known of each way since it was chosen, and what its use has taught."""
    rates = {link.peer: link.bytes_per_s for link in learned}
    return tuple(msgspec.structs.replace(link, bytes_per_s=rates.get(link.peer, 0.0)) for link in paired)
