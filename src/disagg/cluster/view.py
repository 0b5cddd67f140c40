"""What a router says of the cluster, as its HTTP front serves it under /cluster and /ready."""

import httpx
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


class RouterWatch:
    """Asks a router over HTTP. Every question has a deadline; a router that does not answer gives None."""

    def __init__(self, url: str) -> None:
        # Proxies of the environment are for the outside world, not for a process next door.
        # Nor is its certificate made for loopback; nothing secret is said.
        self._client = httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False, verify=False)

    async def is_healthy(self) -> bool:
        """Whether /ready answers 200."""
        response = await self._get("/ready")
        return response is not None and response.status_code == httpx.codes.OK

    async def cluster(self) -> ClusterView | None:
        """The state of every worker."""
        response = await self._get("/cluster")
        if response is None or response.status_code != httpx.codes.OK:
            return None
        try:
            return msgspec.json.decode(response.content, type=ClusterView)
        except msgspec.DecodeError:
            return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            return await self._client.get(path)
        except httpx.HTTPError:
            return None
