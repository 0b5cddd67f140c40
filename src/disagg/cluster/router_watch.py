"""Asking a router over HTTP how its cluster is."""

import httpx
import msgspec

from disagg.cluster.view import ANSWER_TIMEOUT_S, ClusterView


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
