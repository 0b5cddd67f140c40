"""The HTTP server of a router process: uvicorn without its own signal handling, since stopping is ours."""

import asyncio
import contextlib
import resource
import socket
from asyncio import sslproto
from collections.abc import Generator
from functools import partial

import msgspec
import uvicorn
from starlette.types import ASGIApp

from disagg.router.connection import DEFAULT_CONNECTION_LIMITS, ConnectionLimits, connection_class

STOP_TIMEOUT_S = 3.0  # for open HTTP connections, once told to stop
TLS_BUFFER_BYTES = 32 << 10  # of each connection; asyncio would take eight times as much, for 512 idle streams 128 MB


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of a certificate (with its chain) and of its private key, both PEM."""

    certificate: str
    key: str


class HttpServer(uvicorn.Server):
    """Serves one application on sockets that listen already."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits = DEFAULT_CONNECTION_LIMITS, tls: TlsFiles | None = None
    ) -> None:
        self._limits = limits
        self._connection = connection_class(limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # whole seconds are not needed
                timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
                ssl_certfile=tls.certificate if tls is not None else None,
                ssl_keyfile=tls.key if tls is not None else None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """With our deadlines for TLS: by itself it waits a minute for a handshake, half of one for a goodbye."""
        config = self.config
        if config.ssl is None:
            await super().startup(sockets)
            return
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES  # of the whole process: there is no other way to say it
        connection = partial(self._connection, config, self.server_state, self.lifespan.state)
        self.servers = [
            await asyncio.get_running_loop().create_server(
                connection,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._limits.header_timeout_s,
                ssl_shutdown_timeout=self._limits.write_timeout_s,  # what it has not read yet goes out before
            )
            for each in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have: each client's connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
