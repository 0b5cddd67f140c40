"""One application under test."""

from collections.abc import Callable

import httpx
from starlette.types import ASGIApp

from disagg.testing.generation import FakeGenerationService


class Site:
    """One application, its fake service and a client without a socket in between."""

    def __init__(self, service: FakeGenerationService, app: ASGIApp, client: httpx.AsyncClient) -> None:
        self.service = service
        self.app = app
        self.client = client

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **fields})


MakeSite = Callable[..., Site]
