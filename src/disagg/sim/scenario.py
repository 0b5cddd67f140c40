"""What is simulated: workers on described hardware, links, limits, targets, work, faults. Frozen values."""

import enum

import msgspec

from disagg.bench.slo import Slo as Slo
from disagg.bench.workload import Workload
from disagg.core.errors import ConfigurationError
from disagg.core.roles import HandoffMode, PartialStart, Role
from disagg.core.spans import KvLayout
from disagg.policy.recovery import RecoveryLimits
from disagg.policy.step_time import StepCosts
from disagg.sim.hardware.serving import Contention
from disagg.sim.hardware.step_model import StepModel

MIB = 1 << 20
MESSAGE_S = 1e-4  # of a control message on one machine
MAX_CONTEXT = 1 << 17  # tokens


ROLES_APART = (Role.PREFILL, Role.DECODE)


class Fidelity(enum.StrEnum):
    """How much of a hand-off is played out.

    SMALL  pushes per layer group over links that share their bandwidth at every moment; rules checked after each event
    LARGE  one push per chunk, its arrival computed; tokens between an answer's first and last reach the router with
           the last; rules checked now and then
    """

    SMALL = "small"
    LARGE = "large"


class Link(msgspec.Struct, frozen=True):
    """One direction of a network card, or of a line between sites. Transfers at the same time share it fairly."""

    bandwidth_bytes_s: float = 25e9
    latency_s: float = 20e-6

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0 or self.latency_s < 0:
            text = f"a link of {self.bandwidth_bytes_s:g} bytes/s and {self.latency_s:g} s"
            raise ConfigurationError(f"{text}: the bandwidth must be above 0, the latency 0 or more")


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its role, how long its steps take, its limits (as `disagg worker` has them), its network card."""

    name: str
    role: Role
    steps: StepModel
    model: str = "model"
    site: str = ""  # transfers between sites also share the line between them
    machine: str = ""  # steps of workers of one machine slow each other down; "": one of its own
    num_blocks: int | None = None  # None: what fits beside the weights
    block_size: int = 16
    max_context: int = MAX_CONTEXT
    chunk_tokens: int = 2048
    mixed_chunk_tokens: int = 512
    itl_target_s: float = 0.0
    step_costs: StepCosts | None = None  # what it knows of its steps when it starts, having served before
    prompts_alone: bool = False
    max_running: int = 256
    answer_headroom: int = 64
    handoff_mode: HandoffMode = HandoffMode.LAYERWISE
    partial_start: PartialStart = PartialStart.AUTO
    min_push_bytes: int = 2 * MIB
    lease_s: float = 30.0
    nic: Link = Link()
    ready_after_s: float = 0.0  # it registers so late: a worker that is being added

    @property
    def layout(self) -> KvLayout:
        """A layout with the model's layers and bytes; how heads make them up does not matter here."""
        per_layer = -(-self.steps.kv_bytes_per_token // self.steps.num_layers)
        return KvLayout(self.steps.num_layers, 1, max(1, -(-per_layer // 4)), "float16", self.block_size)

    def blocks(self) -> int:
        """Raises ConfigurationError when nothing fits."""
        num_blocks = self.num_blocks
        if num_blocks is None:
            num_blocks = self.steps.max_kv_tokens(self.block_size) // self.block_size
        if num_blocks < 1:
            raise ConfigurationError(f"worker {self.name} has room for {num_blocks} KV blocks; it needs 1 or more")
        return num_blocks


class SiteLine(msgspec.Struct, frozen=True):
    """What all transfers from one site to another go over."""

    source: str
    target: str
    link: Link


class WorkerDies(msgspec.Struct, frozen=True):
    """Like SIGKILL; another incarnation comes restart_after_s later, or never."""

    at_s: float
    worker: str
    restart_after_s: float | None = None


class LinkBreaks(msgspec.Struct, frozen=True):
    """Two workers lose each other, and what is on the way between them is lost; they meet again for_s later."""

    at_s: float
    source: str
    target: str
    for_s: float


class WorkerDrains(msgspec.Struct, frozen=True):
    """An operator takes it out of service; it stays until it is idle."""

    at_s: float
    worker: str


class WorkerSlows(msgspec.Struct, frozen=True):
    """Steps that begin from then on, its own and those of its successors, take so many times as long as described."""

    at_s: float
    worker: str
    prompts: float = 1.0  # what reading prompts takes
    streams: float = 1.0  # the rest of a step

    def __post_init__(self) -> None:
        if not (0 < self.prompts < float("inf") and 0 < self.streams < float("inf")):
            text = f"{self.worker} takes {self.prompts:g} and {self.streams:g} times as long"
            raise ConfigurationError(f"{text}: both must be above 0; 1 is as described")


Fault = WorkerDies | LinkBreaks | WorkerDrains | WorkerSlows


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Raises ConfigurationError for names that do not fit together."""

    workers: tuple[WorkerSpec, ...]
    work: Workload
    slo: Slo = Slo()
    fidelity: Fidelity = Fidelity.SMALL
    lines: tuple[SiteLine, ...] = ()
    faults: tuple[Fault, ...] = ()
    local_prefill_tokens: int = 512
    max_open_requests: int = 1 << 30
    max_claimed_share: float = 8.0
    recovery: RecoveryLimits = RecoveryLimits()
    contention: Contention = Contention()  # of workers that name the same machine
    request_s: float = 0.0  # what HTTP takes of each request; spent before the router places it
    message_s: float = MESSAGE_S  # of a control message, beside the link's latency
    detect_s: float = 1.0  # from a death to the others' knowing of it
    limit_s: float = 1e7  # virtual seconds after which the run is given up
    max_alike_steps: int = 64  # of one event at large fidelity; 1: each has a row for each stream as well
    max_events_between_checks: int = 50_000  # where rules are checked now and then
    max_timelines: int = 0  # of the last requests that ended, kept as a live router keeps them; small fidelity only

    def __post_init__(self) -> None:
        names = [worker.name for worker in self.workers]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(f"workers {names}: there must be at least one, each with its own name")
        for model in self.models:
            roles = {worker.role for worker in self.workers if worker.model == model}
            if Role.MIXED not in roles and len(roles) < len(ROLES_APART):
                only = ", ".join(roles)
                text = f"nobody can serve {model!r}: all of its workers are {only}"
                raise ConfigurationError(f"{text}; give it mixed ones, or prefill and decode")
        if self.max_timelines and self.fidelity is not Fidelity.SMALL:
            text = f"max_timelines is {self.max_timelines} at {self.fidelity.value} fidelity, where few tokens are told"
            raise ConfigurationError(f"{text}: timelines need small fidelity")
        sites = list(dict.fromkeys(worker.site for worker in self.workers))
        for line in self.lines:
            for site in (line.source, line.target):
                if site not in sites:
                    known = ", ".join(repr(each) for each in sites)
                    raise ConfigurationError(f"a line joins site {site!r}, where no worker is; they are at {known}")
        for fault in self.faults:
            for name in (fault.source, fault.target) if isinstance(fault, LinkBreaks) else (fault.worker,):
                if name not in names:
                    raise ConfigurationError(f"{fault} names worker {name!r}; there is {', '.join(names)}")

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(worker.model for worker in self.workers))
