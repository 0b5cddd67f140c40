"""How one worker process is set up. Field names are the command line's flags."""

import msgspec

from disagg.channel.channel import DEFAULT_BEAT_INTERVAL_S
from disagg.channel.keys import check_exposure
from disagg.core.endpoints import TransportChoice, is_wildcard
from disagg.core.errors import ConfigurationError
from disagg.core.formats import Kernels, KvDtype, KvWire, Weights
from disagg.core.ids import RANK_MARK
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role
from disagg.transport.wire import MAX_LANES

MAX_NICENESS = 19  # the kernel's


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Raises ConfigurationError when a value cannot work."""

    model: str  # path of a model, or a known name
    served_name: str  # what clients call it
    role: Role
    worker_id: str
    router_address: str  # "host:port" of the router's control port
    host: str = "127.0.0.1"  # where peers reach this worker
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    cores: tuple[int, ...] = ()  # pin to these; empty: not pinned
    niceness: int = 0  # how far its processor time goes to others first, 0 to 19; cannot be taken back
    num_threads: int | None = None  # for arithmetic; None: one per core
    block_size: int = 16  # tokens
    kv_memory_bytes: int = 1 << 30
    num_blocks: int | None = None  # overrides kv_memory_bytes
    max_context: int | None = None  # tokens; caps what the model allows
    chunk_tokens: int = 512  # prompt tokens per step when no stream runs
    mixed_chunk_tokens: int = 128  # prompt tokens per step beside running streams, while no time is predicted
    itl_target_s: float = 0.1  # prompts beside running streams fill steps up to this; 0: mixed_chunk_tokens, always
    max_running: int = 64  # sequences in one step
    handoff: HandoffMode = HandoffMode.LAYERWISE
    partial_start: PartialStart = PartialStart.AUTO
    first_token: FirstToken = FirstToken.AT_ONCE
    min_push_bytes: int = 2 << 20
    transport: TransportChoice = TransportChoice.AUTO
    kv_wire: KvWire = KvWire.NATIVE  # of KV to and from peers; others than native lose bits
    lease_s: float = 30.0
    progress_timeout_s: float = 10.0  # without a finished layer, or a turn of the loop: the process ends itself
    drain_timeout_s: float = 60.0  # for what runs, once told to end
    beat_interval_s: float = DEFAULT_BEAT_INTERVAL_S  # a peer silent for two of these is lost
    keys: str = ""  # directory made by `disagg keys`: peers and router are met under mutual TLS; "": loopback only
    data_connections: int = 1  # from this worker to each peer
    probe_s: float = 0.05  # spent on measuring each link at pairing; 0: not measured
    link_gbits: float = 0.0  # what a link should give, in Gbit/s; 0: as the network card says
    numerics: Numerics = Numerics.EXACT
    weights: Weights = Weights.FP32
    kv_dtype: KvDtype = KvDtype.FLOAT32
    kernels: Kernels = Kernels.AUTO
    metrics_host: str = "127.0.0.1"  # where this worker's own /metrics is, if anywhere
    metrics_port: int | None = None  # 0: any free one; None: nowhere, the router shows them

    def __post_init__(self) -> None:
        limits = (
            ("block_size", self.block_size, 1),
            ("kv_memory_bytes", self.kv_memory_bytes, 1),
            ("num_blocks", self.num_blocks, 1),
            ("num_threads", self.num_threads, 1),
            ("max_context", self.max_context, 1),
            ("chunk_tokens", self.chunk_tokens, 1),
            ("mixed_chunk_tokens", self.mixed_chunk_tokens, 1),
            ("max_running", self.max_running, 1),
            ("min_push_bytes", self.min_push_bytes, 0),
            ("data_connections", self.data_connections, 1),
        )
        for name, value, least in limits:
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}: it must be at least {least}")
        if self.kv_wire is not KvWire.NATIVE and self.numerics is Numerics.EXACT:
            text = f"kv_wire {self.kv_wire.value} loses bits, which exact numerics do not allow"
            raise ConfigurationError(f"{text}: add --numerics bounded or leave it out")
        if self.itl_target_s < 0:
            raise ConfigurationError(f"itl_target_s is {self.itl_target_s:g}: give seconds, or 0 for no target")
        if not 0 <= self.niceness <= MAX_NICENESS:
            raise ConfigurationError(f"niceness is {self.niceness}: it must be 0 (like others) to {MAX_NICENESS}")
        if self.data_connections > MAX_LANES:
            raise ConfigurationError(f"data_connections is {self.data_connections}: at most {MAX_LANES}")
        for name, number in (("probe_s", self.probe_s), ("link_gbits", self.link_gbits)):
            if not number >= 0:
                raise ConfigurationError(f"{name} is {number:g}: it must be at least 0")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigurationError(f"metrics_port is {self.metrics_port}: it must be 0 (any free one) to 65535")
        if is_wildcard(self.host):
            text = f"host {self.host} is no address that peers could dial: name the one where they reach this machine"
            raise ConfigurationError(text)
        check_exposure("--host", self.host, self.keys)
        for name, seconds in (("lease_s", self.lease_s), ("beat_interval_s", self.beat_interval_s)):
            if seconds <= 0:
                raise ConfigurationError(f"{name} is {seconds:g}: it must be above 0 seconds")
        for name, text in (("worker_id", self.worker_id), ("served_name", self.served_name), ("model", self.model)):
            if not text.strip():
                raise ConfigurationError(f"{name} is empty: give it a value")
        if RANK_MARK in self.worker_id:
            raise ConfigurationError(f"worker_id {self.worker_id} has a {RANK_MARK}, which marks ranks: leave it out")
