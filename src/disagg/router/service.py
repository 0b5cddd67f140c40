"""The live GenerationService: one thread that owns the dispatcher, the workers' channels and the open streams.

1. A worker connects to the control port; its first message must be RegisterWorker.
2. Messages of workers and requests of clients become the dispatcher's events; its actions are carried out here.
3. Deliveries go into the stream of their request: the HTTP side waits for them, or is given them at once where it can.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from disagg import __version__
from disagg.channel.channel import Channel
from disagg.channel.keys import Keys
from disagg.channel.listening import Listener, listen
from disagg.core.errors import Failure, FailureKind, PeerFault, ProtocolViolation, Unavailable
from disagg.core.ids import RequestId, WorkerId
from disagg.dispatch.actions import Deliver, DispatchAction, LogDecision, RefuseWorker, SendToWorker
from disagg.dispatch.decided import RequestSubmitted
from disagg.dispatch.dispatcher import Dispatcher
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
from disagg.dispatch.open_request import OpenRequest
from disagg.dispatch.stream import (
    GenerateRequest,
    ModelStatus,
    RequestFailed,
    StreamEvent,
    TokensDelivered,
    TokenStream,
)
from disagg.policy.routing import Path
from disagg.policy.step_time import StepCosts
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import (
    AnswerCluster,
    AnswerDrain,
    RegisterWorker,
    RequestCluster,
    RequestDrain,
    WorkerState,
    WorkerToRouter,
)
from disagg.router.metrics import RouterMetrics
from disagg.router.stream_times import StreamTimes
from disagg.telemetry.decision_log import DecisionLog
from disagg.telemetry.metrics import CONTROL_REFUSED, Metric
from disagg.telemetry.track import RequestTrack

_log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
TICK_S = 0.5  # how exactly the dispatcher's deadlines, of many seconds each, are kept

_FROM_WORKER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)


class LiveStream:
    """One open request. Events are put in by the service, read by one reader."""

    def __init__(
        self,
        service: "LiveService",
        request_id: RequestId,
        opened: OpenRequest | None,
        num_choices: int,
        times: StreamTimes,
    ) -> None:
        self._service = service
        self._request_id = request_id
        self._opened = opened
        self._events: deque[StreamEvent] = deque()  # bounded by max_tokens of each choice
        self._reader: asyncio.Future[None] | None = None  # waits for an event
        self._open_choices = set(range(num_choices))
        self._times = times
        self._take: Callable[[TokensDelivered], bool] | None = None  # the reader's, for what need not wait
        self._is_over = False

    @property
    def request_id(self) -> RequestId:
        return self._request_id

    @property
    def num_cached_tokens(self) -> int:
        return self._opened.num_cached_tokens if self._opened is not None else 0

    def events(self) -> AsyncIterator[StreamEvent]:
        return self

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        if not self._open_choices:
            self._end()
            raise StopAsyncIteration
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._pop()

    def take_ready(self) -> list[StreamEvent]:
        ready: list[StreamEvent] = []
        while self._open_choices and self._events and not isinstance(self._events[0], RequestFailed):
            ready.append(self._pop())
        return ready

    def _pop(self) -> StreamEvent:
        event = self._events.popleft()
        if isinstance(event, RequestFailed):
            self._open_choices.clear()
            self._end()
        elif event.finish_reason is not None:
            self._open_choices.discard(event.choice)
        return event

    def push_to(self, take: Callable[[TokensDelivered], bool]) -> None:
        self._take = take

    def finish_choice(self, choice: int) -> None:
        self._open_choices.discard(choice)
        self._times.note_end(choice)
        self._service.stop_choice(self._request_id, choice)

    def abort(self) -> None:
        if not self._is_over:
            self._end()
            self._open_choices.clear()
            self._service.abort(self._request_id)

    def _end(self) -> None:
        self._is_over = True
        self._take = None

    def put(self, event: StreamEvent, now_s: float) -> None:
        if isinstance(event, TokensDelivered):
            self._times.note_tokens(event.choice, len(event.tokens), now_s)
            if event.finish_reason is not None:
                self._times.note_end(event.choice)
            elif self._take is not None and self._reader is not None and not self._events and self._take(event):
                return
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class LiveService:
    """Everything behind the HTTP front. All methods are called on the event loop's thread."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        beat_interval_s: float,
        keys: Keys | None = None,
        decision_log: DecisionLog | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._log = decision_log
        self._metrics = RouterMetrics(dispatcher)
        self._beat_interval_s = beat_interval_s
        self._keys = keys
        self._channels: dict[WorkerId, Channel[WorkerToRouter]] = {}
        self._registering: dict[WorkerId, Channel[WorkerToRouter]] = {}
        self._streams: dict[RequestId, LiveStream] = {}
        self._server: Listener | None = None
        self._started_s = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()
        self._perform: dict[type, Callable[..., None]] = {
            SendToWorker: self._send,
            RefuseWorker: self._refuse,
            LogDecision: lambda action: _log.info("%s", action.text),
        }
        self._ticking: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> str:
        """Accept workers; gives "host:port". Raises OSError when the address cannot be bound."""
        self._server = await listen(
            host, port, _FROM_WORKER, self._welcome, tls=self._keys.accepting if self._keys else None
        )
        self._ticking = asyncio.create_task(self._tick())
        return self._server.address

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(TimePassed())
            if self._server is not None:
                for reason, count in self._server.refused.take().items():
                    self.dispatcher.counters.add(CONTROL_REFUSED, count, label=reason.value)

    async def close(self) -> None:
        """Fail every open request, then let the workers go."""
        for stream in list(self._streams.values()):
            stream.put(RequestFailed(Unavailable("the router is stopping", retry_after_s=1.0)), time.monotonic())
        self._streams.clear()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for channel in list(self._channels.values()):
            await channel.close()
        for task in list(self._closing):
            await task

    # --- GenerationService -------------------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, track: RequestTrack | None = None, received_s: float | None = None
    ) -> TokenStream:
        now_s = time.monotonic()
        if self._log is not None:
            self._log.happened(RequestSubmitted(request), now_s)
        request_id, actions = self.dispatcher.submit(request, now_s, track)
        opened = self.dispatcher.open_request(request_id)
        path = opened.path if opened is not None else Path.MIXED
        start_s = now_s if received_s is None else received_s
        times = StreamTimes(self._metrics, path, request.num_choices, start_s)
        stream = LiveStream(self, request_id, opened, request.num_choices, times)
        self._streams[request_id] = stream
        self._act(actions, now_s)
        return stream

    def models(self) -> tuple[ModelStatus, ...]:
        return self.dispatcher.models()

    def count(self, metric: Metric, label: str) -> None:
        self.dispatcher.counters.add(metric, label=label)

    def metrics_text(self) -> bytes:
        return self._metrics.text()

    def cluster_json(self) -> bytes:
        workers = [
            {
                "worker_id": record.card.worker_id,
                "role": record.card.role,
                "model": record.card.pool.model,
                "connected": True,
                "draining": record.is_draining,
                "partners": sorted(record.partners),
                "state": _state_fields(record.state),
            }
            for record in self.dispatcher.registry.records()
        ]
        models = [{"model": s.model, "is_ready": s.is_ready, "missing": s.missing} for s in self.models()]
        router = {
            "incarnation": f"{self.dispatcher.config.incarnation:x}",
            "num_open_requests": self.dispatcher.num_open,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
        }
        return msgspec.json.encode({"router": router, "models": models, "workers": workers})

    # --- streams -----------------------------------------------------------------------------------------------

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._handle(ChoiceStopped(request_id, choice))
        self._forget_ended(request_id)

    def abort(self, request_id: RequestId) -> None:
        self._handle(ClientGone(request_id))
        self._forget_ended(request_id)

    def check_invariants(self) -> None:
        self.dispatcher.check_invariants()
        if self._server is not None:
            self._server.check_invariants()

    # --- workers -----------------------------------------------------------------------------------------------

    async def _welcome(self, channel: Channel[WorkerToRouter]) -> None:
        try:
            message = await channel.receive(HANDSHAKE_TIMEOUT_S)
            if not isinstance(message, RegisterWorker | RequestDrain | RequestCluster):
                raise ProtocolViolation(f"{type(message).__name__} before registration")
        except PeerFault as error:
            _log.info("connection from %s refused: %s", channel.peer_address, error)
            await channel.close()
            return
        if isinstance(message, RequestDrain):
            channel.send(self._drain(message.worker_id))
            await channel.close()
            return
        if isinstance(message, RequestCluster):
            cards = tuple(record.card for record in self.dispatcher.registry.records())
            channel.send(AnswerCluster(__version__, cards, is_encrypted=self._keys is not None))
            await channel.close()
            return
        card = message.card
        self._registering[card.worker_id] = channel
        self._handle(WorkerRegistered(card, message.is_draining))
        self._registering.pop(card.worker_id, None)
        if channel.is_open and self._channels.get(card.worker_id) is channel:
            self._start(card, channel)

    def _drain(self, worker_id: WorkerId) -> AnswerDrain:
        if self.dispatcher.registry.get(worker_id) is None:
            known = ", ".join(sorted(record.card.worker_id for record in self.dispatcher.registry.records()))
            text = f"no worker {worker_id} is registered here; there is {known or 'none'}"
            return AnswerDrain(Failure(FailureKind.INVALID_REQUEST, text))
        self._handle(DrainAsked(worker_id))
        return AnswerDrain()

    def _start(self, card: WorkerCard, channel: Channel[WorkerToRouter]) -> None:
        def on_lost(reason: str) -> None:
            if self._channels.get(card.worker_id) is not channel:
                return  # it has registered again on a newer connection
            del self._channels[card.worker_id]
            _log.warning("worker %s lost: %s", card.worker_id, reason)
            self._handle(WorkerLost(card.worker_id, card.incarnation, reason))

        def on_message(message: WorkerToRouter) -> None:
            event = WorkerMessageReceived(card.worker_id, card.incarnation, message)
            self._handle(event)

        channel.start(
            beat_interval_s=self._beat_interval_s,
            on_message=on_message,
            on_lost=on_lost,
        )
        _log.info("worker %s registered: %s of %s", card.worker_id, card.role.value, card.pool.model)

    # --- actions -----------------------------------------------------------------------------------------------

    def _handle(self, event: DispatchEvent) -> None:
        now_s = time.monotonic()
        if self._log is not None:
            self._log.happened(event, now_s)
        self._act(self.dispatcher.handle(event, now_s), now_s)

    def _act(self, actions: list[DispatchAction], now_s: float) -> None:
        ended: list[RequestId] = []
        for action in actions:
            if not isinstance(action, Deliver):
                self._perform[type(action)](action)
                continue
            request_id, event = action.request_id, action.event
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(event, now_s)
            if isinstance(event, RequestFailed) or event.finish_reason is not None:
                ended.append(request_id)
        for request_id in ended:  # only now: one message of a worker may carry the last tokens of several choices
            self._forget_ended(request_id)

    def _send(self, action: SendToWorker) -> None:
        joining = self._registering.pop(action.worker_id, None)
        if joining is not None:  # accepted: the first message is the answer to its registration
            replaced = self._channels.get(action.worker_id)
            self._channels[action.worker_id] = joining
            if replaced is not None:
                self._close_later(replaced)
        channel = self._channels.get(action.worker_id)
        if channel is not None:
            channel.send(action.message)

    def _refuse(self, action: RefuseWorker) -> None:
        channel = self._registering.pop(action.worker_id, None)
        if channel is not None:
            channel.send(action.message)
            self._close_later(channel)

    def _close_later(self, channel: Channel[WorkerToRouter]) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget_ended(self, request_id: RequestId) -> None:
        if self.dispatcher.open_request(request_id) is None:
            self._streams.pop(request_id, None)


def _state_fields(state: WorkerState) -> dict[str, object]:
    """Counts by name, and what it has learned: of its links, and what its steps cost."""
    links = [msgspec.structs.asdict(link) for link in state.links]
    counts = {name: value for name, value in msgspec.structs.asdict(state).items() if isinstance(value, int)}
    costs = dict(zip(StepCosts.__struct_fields__, state.step_costs, strict=False))  # it may be of another release
    return {**counts, "links": links, "step_costs": costs}
