"""What a router says of the cluster, as its HTTP front serves it under /cluster and /ready."""

import msgspec

# One answer of a router on the same machine takes milliseconds; a busy one gets this long.
ANSWER_TIMEOUT_S = 3.0


class RouterView(msgspec.Struct, frozen=True):
    incarnation: int | str = 0
    num_open_requests: int = 0
    uptime_s: float = 0.0


class ModelView(msgspec.Struct, frozen=True):
    model: str
    is_ready: bool
    missing: str = ""  # plain sentence; "" when ready


class WorkerStateView(msgspec.Struct, frozen=True):
    """Counts of disagg.protocol.messages.WorkerState by name."""

    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_reserved_blocks: int = 0
    num_held_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_handoffs: int = 0
    num_waiting_tokens: int = 0
    num_decoding: int = 0


class WorkerView(msgspec.Struct, frozen=True):
    worker_id: str
    role: str
    model: str
    state: WorkerStateView = WorkerStateView()
    connected: bool = True
    draining: bool = False


class ClusterView(msgspec.Struct, frozen=True):
    router: RouterView = RouterView()
    models: tuple[ModelView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
