"""Every message that crosses a control connection.

    worker -> router   RegisterWorker, ReportPairing, EmitTokens, ReportFailure, ReportState
    router -> worker   AnswerRegistration, AnnouncePeers, StartSequence, AbortSequence, DrainWorker
    operator -> router RequestDrain, RequestCluster, answered by AnswerDrain, AnswerCluster
    operator -> worker RequestExamination, answered by AnswerExamination
    worker -> worker   RequestPairing, AnswerPairing, RequestReservation, AnswerReservation,
                       OfferReservation, FinishPrefill, TakeHandoff, CancelHandoff, RenewLeases
    any direction      Beat

What a worker shows of itself in them stands in cards.py. Leases travel as remaining seconds; clocks of two processes
are never compared.
"""

from typing import Annotated

import msgspec

from disagg.core.endpoints import TransportRate
from disagg.core.errors import Failure
from disagg.core.ids import BlockId, Fence, HandoffId, Incarnation, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SequenceSpec
from disagg.core.roles import Task
from disagg.protocol.cards import WorkerCard
from disagg.telemetry.stages import StageTime


class CounterValue(msgspec.Struct, frozen=True, array_like=True):
    """One running total: its name in the table of metrics, the value of its label ("" without), the total."""

    name: str
    label: str
    total: float


class LinkState(msgspec.Struct, frozen=True, array_like=True):
    """What a worker knows of its way to one peer."""

    peer: WorkerId
    bytes_per_s: float  # learned from what was sent; 0: nothing was
    transport: str = ""  # what carries KV there
    measured_bytes_per_s: float = 0.0  # when they met; 0: not measured


class WorkerState(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of itself again and again. A hint to routers: the worker's answer decides."""

    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_reserved_blocks: int = 0
    num_held_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_waiting: int = 0  # sequences without blocks
    num_running: int = 0
    num_handoffs: int = 0  # both ends
    num_waiting_tokens: int = 0  # prompt tokens not yet computed
    counters: tuple[CounterValue, ...] = ()
    step_costs: tuple[float, ...] = ()  # learned coefficients of its step time, as in policy.step_time.StepCosts
    links: tuple[LinkState, ...] = ()  # to paired peers
    num_decoding: int = 0  # of those that run: streams that write an answer


# --- worker -> router -------------------------------------------------------------------------------------------


class RegisterWorker(msgspec.Struct, frozen=True, array_like=True, tag="register_worker"):
    """First message of a worker's connection to a router."""

    card: WorkerCard
    is_draining: bool = False


class ReportPairing(msgspec.Struct, frozen=True, array_like=True, tag="report_pairing"):
    """Whether this worker can hand KV to `peer`; failure is None when it can."""

    peer: WorkerId
    peer_incarnation: Incarnation
    failure: Failure | None


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the first token by the worker that computed it: how the prompt was read."""

    attempt_id: HandoffId
    num_cached_tokens: int  # prompt tokens answered by this worker's prefix index
    num_computed_tokens: int
    handoff_bytes: int = 0  # source only: pushed to the destination, or about to be
    hidden_bytes: int = 0  # source only: of those, acknowledged by now
    hidden_s: float = 0.0  # source only: time so far in which pushes were under way


class StageReport(msgspec.Struct, frozen=True, array_like=True):
    """What this worker has spent on a timed attempt, from its start or its last report to the token at `position`."""

    attempt_id: HandoffId
    position: int
    stages: tuple[StageTime, ...]


class EmitTokens(msgspec.Struct, frozen=True, array_like=True, tag="emit_tokens"):
    """All tokens of one step; with them, how prompts were read and what timed attempts have spent."""

    tokens: tuple[EmittedToken, ...]
    prompts: tuple[PromptReport, ...] = ()
    stages: tuple[StageReport, ...] = ()


class ReportFailure(msgspec.Struct, frozen=True, array_like=True, tag="report_failure"):
    """This worker cannot do its part of a sequence and has dropped it."""

    sequence_id: SequenceId
    attempt: int
    failure: Failure
    num_kept_tokens: int = 0  # longest prefix whose KV stays in this worker's prefix index


class ReportState(msgspec.Struct, frozen=True, array_like=True, tag="report_state"):
    """Sent four times a second, and when draining begins."""

    state: WorkerState
    is_draining: bool = False


class RequestDrain(msgspec.Struct, frozen=True, array_like=True, tag="request_drain"):
    """First and only message of an operator's connection to the control port: drain this worker."""

    worker_id: WorkerId


class RequestCluster(msgspec.Struct, frozen=True, array_like=True, tag="request_cluster"):
    """First and only message of an operator's connection to the control port: who is here?"""


# --- router -> worker -------------------------------------------------------------------------------------------


class AnswerRegistration(msgspec.Struct, frozen=True, array_like=True, tag="answer_registration"):
    """Accepted when failure is None."""

    router: Incarnation  # what names of its requests begin with
    failure: Failure | None = None


class AnswerDrain(msgspec.Struct, frozen=True, array_like=True, tag="answer_drain"):
    """failure is None when the worker has been told."""

    failure: Failure | None = None


class AnswerCluster(msgspec.Struct, frozen=True, array_like=True, tag="answer_cluster"):
    """Every registered worker; the version of this release."""

    version: str
    cards: tuple[WorkerCard, ...]
    is_encrypted: bool = False  # workers are met under mutual TLS


class AnnouncePeers(msgspec.Struct, frozen=True, array_like=True, tag="announce_peers"):
    """All workers this one should pair with; who is missing has left."""

    peers: tuple[WorkerCard, ...]


class StartSequence(msgspec.Struct, frozen=True, array_like=True, tag="start_sequence"):
    """One worker's part of one sequence. peer: the other end of the hand-off, if there is one.

    emitted_ids: tokens of the answer that are known already; whoever reads the prompt reads them too and goes on after
    the last. A higher attempt replaces a lower one of the same sequence.
    is_timed: say with its first tokens what the time went to.
    """

    spec: SequenceSpec
    task: Task
    attempt: int
    emitted_ids: tuple[int, ...] = ()
    peer: WorkerId | None = None
    peer_incarnation: Incarnation | None = None
    is_timed: bool = False


class AbortSequence(msgspec.Struct, frozen=True, array_like=True, tag="abort_sequence"):
    """Drop attempts up to this one, wherever they stand. Unknown ids are ignored and counted."""

    sequence_id: SequenceId
    attempt: int
    reason: str


class DrainWorker(msgspec.Struct, frozen=True, array_like=True, tag="drain_worker"):
    """Take no new work, finish or give away what there is, then end."""


# --- worker -> worker -------------------------------------------------------------------------------------------


class RequestPairing(msgspec.Struct, frozen=True, array_like=True, tag="request_pairing"):
    """First message of a connection between workers."""

    card: WorkerCard


class AnswerPairing(msgspec.Struct, frozen=True, array_like=True, tag="answer_pairing"):
    """Accepted when failure is None; the card is the answerer's."""

    card: WorkerCard
    failure: Failure | None = None


class RequestReservation(msgspec.Struct, frozen=True, array_like=True, tag="request_reservation"):
    """Source to destination, when the first chunk is about to run."""

    handoff_id: HandoffId
    fence: Fence
    num_tokens: int


class AnswerReservation(msgspec.Struct, frozen=True, array_like=True, tag="answer_reservation"):
    """Blocks for the whole prompt, or a refusal. Nobody waits: a refused request is asked again later.

    retry_after_s: ask again then, unless OfferReservation comes sooner.
    """

    handoff_id: HandoffId
    fence: Fence
    failure: Failure | None = None
    retry_after_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # a number: clocks are set by it
    blocks: tuple[BlockId, ...] = ()
    first_missing_token: int = 0
    grant_key: bytes = b""
    num_blocks: int = 0  # of the destination's arena: with its layout, what turns blocks into byte ranges


class OfferReservation(msgspec.Struct, frozen=True, array_like=True, tag="offer_reservation"):
    """Destination to source: what was refused would fit now. Nothing is kept for it; ask again."""

    handoff_id: HandoffId
    fence: Fence


class FinishPrefill(msgspec.Struct, frozen=True, array_like=True, tag="finish_prefill"):
    """Source to destination: the prompt is computed; here is the first token.

    bytes_per_s: what the source has learned of its link to the destination, or has measured before; 0: neither.
    """

    handoff_id: HandoffId
    fence: Fence
    first_token: EmittedToken
    bytes_per_s: float = 0.0


class TakeHandoff(msgspec.Struct, frozen=True, array_like=True, tag="take_handoff"):
    """Destination to source: all is here and verified; the source may let go."""

    handoff_id: HandoffId
    fence: Fence


class CancelHandoff(msgspec.Struct, frozen=True, array_like=True, tag="cancel_handoff"):
    """Either end: this hand-off is over without success."""

    handoff_id: HandoffId
    fence: Fence
    failure: Failure


class RenewLeases(msgspec.Struct, frozen=True, array_like=True, tag="renew_leases"):
    """Either end: I still want these hand-offs; keep what you hold for them another lease_s seconds.

    By the clock, a third of the way; and in answer to a peer with a shorter lease, which gives up sooner.
    """

    handoff_ids: tuple[HandoffId, ...]
    lease_s: float


# --- operator -> worker -----------------------------------------------------------------------------------------


class RequestExamination(msgspec.Struct, frozen=True, array_like=True, tag="request_examination"):
    """First and only message of an operator's connection to a worker: how do you stand? Links are measured anew."""


class LinkReport(msgspec.Struct, frozen=True, array_like=True):
    """From this worker to one peer. Rates are 0 where nothing was measured."""

    peer: WorkerId
    transport: str = ""  # "": not paired
    is_encrypted: bool = False
    bytes_per_s: float = 0.0
    latency_s: float = 0.0  # there and back
    expected_bytes_per_s: float = 0.0  # 0: unknown
    failure: Failure | None = None  # why they are not paired, or could not be measured
    choice: str = ""  # why this transport
    rates: tuple[TransportRate, ...] = ()  # of every kind that both can use


class HostLimits(msgspec.Struct, frozen=True, array_like=True):
    """What the machine allows this process."""

    max_open_files: int  # -1: no limit
    max_locked_bytes: int  # -1: no limit
    shared_memory_bytes: int  # free in /dev/shm; 0: there is none
    num_cores: int


class AnswerExamination(msgspec.Struct, frozen=True, array_like=True, tag="answer_examination"):
    """What an operator wants to know. clock_s is shown to people and compared by nobody else."""

    card: WorkerCard
    version: str
    limits: HostLimits
    clock_s: float  # seconds since 1970, by this machine
    is_encrypted: bool
    links: tuple[LinkReport, ...]


# --- any direction ----------------------------------------------------------------------------------------------


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """I am alive: my loop turns. The next one comes within interval_s seconds."""

    interval_s: float


WorkerToRouter = (
    RegisterWorker | ReportPairing | EmitTokens | ReportFailure | ReportState | RequestDrain | RequestCluster | Beat
)
RouterToWorker = (
    AnswerRegistration
    | AnswerDrain
    | AnswerCluster
    | AnnouncePeers
    | StartSequence
    | AbortSequence
    | DrainWorker
    | Beat
)
WorkerToWorker = (
    RequestPairing
    | AnswerPairing
    | RequestReservation
    | AnswerReservation
    | OfferReservation
    | FinishPrefill
    | TakeHandoff
    | CancelHandoff
    | RenewLeases
    | RequestExamination
    | AnswerExamination
    | Beat
)
Message = WorkerToRouter | RouterToWorker | WorkerToWorker
