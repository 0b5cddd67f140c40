"""One application under test."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
from starlette.types import ASGIApp

from disagg.router.connection import ConnectionLimits
from disagg.router.listening import listen
from disagg.router.server import HttpServer, TlsFiles
from disagg.testing.generation import FakeGenerationService

STOP_TIMEOUT_S = 20.0


class Tls(NamedTuple):
    """Both sides of an HTTPS router on this machine."""

    files: TlsFiles
    trusting: ssl.SSLContext  # of its clients


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


@asynccontextmanager
async def listening(app: ASGIApp, limits: ConnectionLimits, tls: TlsFiles | None = None) -> AsyncIterator[int]:
    """The port of an application behind the router's own server."""
    server, listener = HttpServer(app, limits, tls), listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, STOP_TIMEOUT_S)
        listener.close()
