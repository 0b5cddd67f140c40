"""A whole cluster in virtual time: the real dispatcher and schedulers, described hardware.

  1. Workers register and pair as live ones do; virtual second 0 is when all that are there from the start have.
  2. Requests come in by the workload's clock, or when others end. The dispatcher places them.
  3. Control messages take a fixed time, bytes share links, steps take what their model says.
  4. Faults are events like any other.

At large fidelity tokens between the first and the last of an answer are kept back from the router and handed to it with
the last, or before anything that could depend on them: a failure, a drain, a death. No decision sees a difference.
"""

from collections.abc import Sequence
from itertools import count

from disagg.bench.workload import WorkRequest, WorkStream, prompt_ids
from disagg.core.errors import DisaggError, FailureKind, InternalFault
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams
from disagg.dispatch.actions import Deliver, DispatchAction, LogDecision, RefuseWorker, SendToWorker
from disagg.dispatch.decided import OnDecided
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.events import DispatchEvent, DrainAsked, TimePassed, WorkerLost, WorkerMessageReceived
from disagg.dispatch.events import WorkerRegistered as Registered
from disagg.dispatch.stream import GenerateRequest, RequestFailed
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    EmitTokens,
    ReportFailure,
    ReportPairing,
    RouterToWorker,
    WorkerToRouter,
    WorkerToWorker,
)
from disagg.protocol.pairing import pairing_failure
from disagg.scheduler import events
from disagg.scheduler.engine import StepPlan
from disagg.sim.events import EventHeap
from disagg.sim.holding import HeldTokens
from disagg.sim.links import ComputedLinks, FairLinks, Links, Route, Routes
from disagg.sim.machine import Machine
from disagg.sim.records import FAILED, FINISHED, TURNED_AWAY, OpenRecord, RecordTable
from disagg.sim.scenario import (
    Fault,
    Fidelity,
    LinkBreaks,
    Scenario,
    WorkerDies,
    WorkerDrains,
    WorkerSlows,
    WorkerSpec,
)
from disagg.sim.setup import card_and_config, dispatcher_config
from disagg.sim.worker import SimWorker
from disagg.telemetry.stages import Stage
from disagg.telemetry.track import Head, RequestTrack, TrackStore

TICK_S = 0.5  # like the live router's
RETRY_S = 0.1  # of a registration while its predecessor is not known to be dead


class SimCluster:
    """Router, workers and links. Everything happens inside run()."""

    def __init__(self, scenario: Scenario, stream: WorkStream, on_decided: OnDecided = lambda decision: None) -> None:
        self.scenario = scenario
        self.heap = EventHeap()
        self.is_small = scenario.fidelity is Fidelity.SMALL
        self.links: Links = FairLinks(self.heap) if self.is_small else ComputedLinks(self.heap)
        self.workers: dict[WorkerId, SimWorker] = {}
        self.ended: list[SimWorker] = []  # earlier incarnations
        self.records = RecordTable()
        self.tracks = TrackStore(scenario.max_timelines)
        self.start_s = 0.0
        self.dispatcher = Dispatcher(dispatcher_config(scenario), on_decided)
        self._stream = stream
        self._model = scenario.models[0]  # of requests that name none
        self._open: dict[RequestId, OpenRecord] = {}
        self._held = HeldTokens(self.heap, self.records, self._open, self._hear, scenario.message_s)
        self._specs = {spec.name: spec for spec in scenario.workers}
        self._incarnations = count(1)
        self._reporting: set[tuple[WorkerId, WorkerId]] = set()  # pairings that the router is being told of
        self._cut: set[tuple[WorkerId, WorkerId]] = set()  # links that are down
        self._slowed: dict[str, WorkerSlows] = {}  # the last of each worker
        self._num_checks = 0
        self._num_due = 0  # requests that will come whatever happens
        names = dict.fromkeys(spec.machine for spec in scenario.workers if spec.machine)
        self._machines = {name: Machine(self.heap, scenario.contention) for name in names}
        self._routes = Routes(scenario)
        for resource, bytes_s in self._routes.capacities():
            self.links.set_capacity(resource, bytes_s)

    # --- running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every request has ended. Raises InternalFault when rules break or time runs out."""
        self._start()
        heap, check_every = self.heap, self.scenario.max_events_between_checks
        while self._num_due or self._open:
            if not heap.step():
                raise InternalFault(f"nothing is left to happen and {len(self._open)} requests are open")
            if heap.num_events % check_every == 0:
                self._check_some()
        self.records.count_gaps()
        self.check_invariants()

    def settle(self, duration_s: float = 60.0) -> None:
        """Let what is still under way end, then see that nothing is left. Raises InternalFault when something is."""
        until_s = self.heap.now_s + duration_s
        while self.heap.next_s() <= until_s:
            self.heap.step()
        for worker in self.workers.values():
            state = worker.scheduler.snapshot()
            held = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
            if not worker.scheduler.is_idle or held or worker.grants:
                raise InternalFault(f"{worker.worker_id} still has {state}, grants {worker.grants}")
        if self.dispatcher.num_open:
            raise InternalFault(f"{self.dispatcher.num_open} requests are still open")

    def _start(self) -> None:
        for spec in self.scenario.workers:
            if spec.ready_after_s <= 0:
                self._start_worker(spec)
        while self.heap.step():
            pass
        self.start_s = self.heap.now_s
        for spec in self.scenario.workers:
            if spec.ready_after_s > 0:
                self.heap.after(spec.ready_after_s, self._start_worker, spec)
        for fault in self.scenario.faults:
            self.heap.after(fault.at_s, self._break, fault)
        self._tick()
        self._pull()

    def _tick(self) -> None:
        """Raises InternalFault when the run takes too long."""
        if self.heap.now_s - self.start_s > self.scenario.limit_s:
            raise InternalFault(f"{len(self._open)} requests are open after {self.scenario.limit_s:g} s")
        self._tell(TimePassed())
        self.heap.after(TICK_S, self._tick)

    def _check_some(self) -> None:
        """The router and one worker, each in its turn: a check looks at every block."""
        self.dispatcher.check_invariants()
        self.links.check_invariants()
        workers = list(self.workers.values())
        self._num_checks += 1
        workers[self._num_checks % len(workers)].scheduler.check_invariants()

    def check_invariants(self) -> None:
        self.dispatcher.check_invariants()
        self.heap.check_invariants()
        self.links.check_invariants()
        for machine in self._machines.values():
            machine.check_invariants()
        self.records.check_invariants()
        for worker in self.workers.values():
            worker.scheduler.check_invariants()

    # --- requests ----------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        request = self._stream.next_request()
        if request is not None:
            self._num_due += 1
            self.heap.at(self.start_s + request.due_s, self._pull_and_submit, request)

    def _pull_and_submit(self, request: WorkRequest) -> None:
        self._pull()
        self._arrive(request)

    def _arrive(self, request: WorkRequest) -> None:
        if self.scenario.request_s:
            self.heap.after(self.scenario.request_s, self._submit, request, self.heap.now_s)
        else:
            self._submit(request, self.heap.now_s)

    def _submit(self, request: WorkRequest, arrived_s: float) -> None:
        self._num_due -= 1
        asked = GenerateRequest(
            request.model or self._model,
            prompt_ids(request.runs),
            SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0),
            priority=request.priority,
        )
        track = self._track(asked, arrived_s) if self.scenario.max_timelines else None
        try:
            request_id, actions = self.dispatcher.submit(asked, self.heap.now_s, track)
        except DisaggError:
            self._end(OpenRecord(request, arrived_s), TURNED_AWAY)
            return
        opened = self.dispatcher.open_request(request_id)
        self._open[request_id] = OpenRecord(request, arrived_s, opened, track)
        self._act(actions)

    def _track(self, asked: GenerateRequest, arrived_s: float) -> RequestTrack:
        """HTTP has read it by now."""
        marks = ((Stage.TOKENISE, self.heap.now_s),)
        return RequestTrack(Head(arrived_s, marks=marks, num_prompt_tokens=len(asked.prompt_ids)), num_choices=1)

    def _end(self, record: OpenRecord, end: int) -> None:
        self.records.close(record, end, self.heap.now_s)
        if record.track is not None:
            self.tracks.put(record.track)
        now_s = self.heap.now_s - self.start_s
        following = self._stream.after_end(record.request, now_s, is_whole=end == FINISHED)
        if following is not None:
            self._num_due += 1
            self.heap.at(self.start_s + following.due_s, self._arrive, following)

    # --- router ------------------------------------------------------------------------------------------------

    def _tell(self, event: DispatchEvent) -> None:
        self._act(self.dispatcher.handle(event, self.heap.now_s))
        if self.is_small:
            self.dispatcher.check_invariants()

    def _act(self, actions: list[DispatchAction]) -> None:
        for action in actions:
            match action:
                case SendToWorker():
                    worker = self.workers.get(action.worker_id)
                    if worker is not None:
                        self.heap.after(self.scenario.message_s, self._to_worker, worker, action.message)
                case Deliver():
                    self._deliver(action)
                case RefuseWorker() | LogDecision():
                    pass

    def _deliver(self, action: Deliver) -> None:
        record = self._open.get(action.request_id)
        if record is None:
            raise InternalFault(f"{action.event} after the end of {action.request_id}")
        if isinstance(action.event, RequestFailed):
            self._close(action.request_id, record, FAILED)
            return
        if self.is_small:
            for _ in action.event.tokens:
                self.records.note_token(record, self.heap.now_s)
        if action.event.finish_reason is not None:
            if record.num_tokens != record.request.num_output_tokens:
                raise InternalFault(f"{action.request_id} ended after {record.num_tokens} tokens: {record.request}")
            self._close(action.request_id, record, FINISHED)

    def _close(self, request_id: RequestId, record: OpenRecord, end: int) -> None:
        del self._open[request_id]
        for worker_id in record.opened.choices[0].workers if record.opened is not None else ():
            self._held.forget(worker_id, SequenceId(request_id, 0))
        self._end(record, end)

    def _to_worker(self, worker: SimWorker, message: RouterToWorker) -> None:
        if not isinstance(message, AnnouncePeers):
            if isinstance(message, AbortSequence):
                self._held.settle(worker, message.sequence_id)
            worker.hear_router(message)
            return
        for card in message.peers:
            peer = self.workers.get(card.worker_id)
            if peer is not None and peer.card.incarnation == card.incarnation and worker.is_alive:
                self._pair(worker, peer)

    def _pair(self, source: SimWorker, target: SimWorker) -> None:
        """Connect if they are not, and report how it stands if the router does not know it so."""
        is_met = source.peers.get(target.worker_id) is target
        failure = None if is_met else pairing_failure(source.card, target.card)
        if failure is None and not is_met:
            if (source.worker_id, target.worker_id) in self._cut:
                return
            source.peers[target.worker_id], target.peers[source.worker_id] = target, source
            source.handle(events.PeerPaired(target.card))
            target.handle(events.PeerPaired(source.card))
        pair = (source.worker_id, target.worker_id)
        record = self.dispatcher.registry.get(source.worker_id)
        is_known = record is not None and record.partners.get(target.worker_id) == target.card.incarnation
        if not is_known and pair not in self._reporting:
            self._reporting.add(pair)
            report = ReportPairing(target.worker_id, target.card.incarnation, failure)
            self.heap.after(self.scenario.message_s, self._hear_pairing, source, report)

    def _hear_pairing(self, source: SimWorker, report: ReportPairing) -> None:
        self._reporting.discard((source.worker_id, report.peer))
        self._hear(source, report)

    # --- what workers do ---------------------------------------------------------------------------------------

    def to_router(self, worker: SimWorker, message: WorkerToRouter) -> None:
        if self.is_small:
            self.heap.after(self.scenario.message_s, self._hear, worker, message)
        elif isinstance(message, EmitTokens):
            self._held.take(worker, message)
        else:
            if isinstance(message, ReportFailure):
                self._held.release(worker, message.sequence_id)
            self.heap.after(self.scenario.message_s, self._hear, worker, message)

    def _hear(self, worker: SimWorker, message: WorkerToRouter) -> None:
        self._tell(WorkerMessageReceived(worker.worker_id, worker.card.incarnation, message))

    def note_ends(self, worker: SimWorker, ends_s: Sequence[float]) -> None:
        if not self.is_small:
            self._held.note_ends(worker, ends_s)

    def to_peer(self, worker: SimWorker, peer: SimWorker, message: WorkerToWorker) -> None:
        self.heap.after(self.route(worker, peer).message_s, peer.hear_peer, worker, message)

    def route(self, source: SimWorker, target: SimWorker) -> Route:
        return self._routes.between(source.worker_id, target.worker_id)

    def note_step(self, worker: SimWorker, plan: StepPlan) -> None:
        for row in plan.rows:
            if not row.output_position:
                record = self._open.get(row.sequence_id.request_id)
                if record is not None and record.started_s != record.started_s:
                    record.started_s = self.heap.now_s

    # --- workers and faults ------------------------------------------------------------------------------------

    def _start_worker(self, spec: WorkerSpec) -> None:
        card, config = card_and_config(spec, self.scenario, Incarnation(next(self._incarnations)))
        old = self.workers.get(card.worker_id)
        if old is not None:
            self.ended.append(old)
        scenario = self.scenario
        worker = SimWorker(
            self,
            card,
            config,
            spec.steps,
            scenario.fidelity,
            scenario.max_alike_steps,
            self._machines.get(spec.machine),
        )
        worker.slow_down(self._slowed.get(spec.name))
        self.workers[card.worker_id] = worker
        self._register(worker)

    def _register(self, worker: SimWorker) -> None:
        refusal = self.dispatcher.registry.refusal(worker.card)
        if refusal is None:
            self._tell(Registered(worker.card))
        elif refusal.kind is FailureKind.OVERLOADED:  # its predecessor is not known to be dead
            self.heap.after(RETRY_S, self._register, worker)
        else:
            raise InternalFault(f"the router refuses {worker.worker_id}: {refusal.message}")

    def _break(self, fault: Fault) -> None:
        match fault:
            case WorkerDies():
                self._kill(self.workers.get(WorkerId(fault.worker)), fault)
            case LinkBreaks():
                self._cut_link(WorkerId(fault.source), WorkerId(fault.target), fault.for_s)
            case WorkerDrains():
                worker = self.workers.get(WorkerId(fault.worker))
                if worker is not None:
                    self._held.release(worker)
                self._tell(DrainAsked(WorkerId(fault.worker)))
            case WorkerSlows():
                self._slowed[fault.worker] = fault
                if (worker := self.workers.get(WorkerId(fault.worker))) is not None:
                    worker.slow_down(fault)

    def _kill(self, worker: SimWorker | None, fault: WorkerDies) -> None:
        if worker is None or not worker.is_alive:
            return
        self._held.release(worker)
        worker.stop()
        detect_s = self.scenario.detect_s
        lost = WorkerLost(worker.worker_id, worker.card.incarnation, "its connection ended")
        self.heap.after(detect_s, self._tell, lost)
        for peer in list(worker.peers.values()):
            self.links.break_pair((worker.worker_id, peer.worker_id))
            self.heap.after(detect_s, self._part, peer, worker)
        if fault.restart_after_s is not None:
            self.heap.after(fault.restart_after_s, self._start_worker, self._specs[fault.worker])

    def _part(self, peer: SimWorker, gone: SimWorker) -> None:
        if peer.peers.get(gone.worker_id) is not gone:
            return
        del peer.peers[gone.worker_id]  # first: what it says now to the one it has lost is not sent
        self.links.break_pair((gone.worker_id, peer.worker_id))
        self.links.break_pair((peer.worker_id, gone.worker_id))
        peer.handle(events.PeerLost(gone.worker_id, gone.card.incarnation, "its connection ended"))

    def _cut_link(self, source: WorkerId, target: WorkerId, for_s: float) -> None:
        one, other = self.workers.get(source), self.workers.get(target)
        if one is None or other is None:
            return
        self._cut |= {(source, target), (target, source)}
        self._part(one, other)
        self._part(other, one)
        self.heap.after(for_s, self._mend, source, target)

    def _mend(self, source: WorkerId, target: WorkerId) -> None:
        self._cut -= {(source, target), (target, source)}
        for record in (self.dispatcher.registry.get(source), self.dispatcher.registry.get(target)):
            if record is not None:
                worker = self.workers[record.card.worker_id]
                self._to_worker(worker, AnnouncePeers(self.dispatcher.registry.peers_to_meet(record.card)))
