"""Main of a router process: tokenizers, control port for workers, HTTP for clients, until told to stop."""

import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from disagg.channel.lifeline import watch_parent
from disagg.core.errors import ConfigurationError
from disagg.core.ids import MAX_INCARNATION, Incarnation
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.modelfiles.fetch import resolve_model
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.policy.recovery import RecoveryLimits
from disagg.router.app import create_app
from disagg.router.config import Announcement, RouterConfig, encode_announcement
from disagg.router.listening import listen
from disagg.router.service import LiveService
from disagg.router.text import ModelText

TEXT_THREADS = 2
STOP_TIMEOUT_S = 3.0  # for open HTTP connections, once told to stop


def run_router(config: RouterConfig) -> int:
    """Blocking; 0 when told to stop. Raises ConfigurationError when the configuration cannot work."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    lifeline = watch_parent()
    try:
        texts = {name: _model_text(path, config) for name, path in config.models}
        asyncio.run(_serve(config, texts))
    finally:
        if lifeline is not None:
            lifeline.close()
    return 0


def _model_text(path: str, config: RouterConfig) -> ModelText:
    tokenizer = load_tokenizer(resolve_model(path))
    return ModelText(tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)


async def _serve(config: RouterConfig, texts: dict[str, ModelText]) -> None:
    dispatcher = Dispatcher(
        DispatcherConfig(
            incarnation=Incarnation(secrets.randbelow(MAX_INCARNATION)),
            tokenizer_digests={name: text.tokenizer.digest for name, text in texts.items()},
            local_prefill_tokens=config.local_prefill_tokens,
            max_open_requests=config.max_open_requests,
            recovery=RecoveryLimits(max_queue_s=config.max_queue_s),
        )
    )
    service = LiveService(dispatcher, beat_interval_s=config.beat_interval_s)
    http = listen(config.host, config.port)
    try:
        control = await service.listen(config.control_host, config.control_port)
    except OSError as error:
        http.close()
        where = f"{config.control_host}:{config.control_port}"
        text = f"cannot listen on {where}: {error.strerror or error}; choose another --control-port"
        raise ConfigurationError(text) from None
    with ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text") as threads:
        app = create_app(service, texts, text_threads=threads, max_body_bytes=config.max_body_bytes)
        server = _HttpServer(app)
        running = asyncio.create_task(server.serve(sockets=[http]))
        host, port = http.getsockname()[:2]
        with contextlib.suppress(OSError):  # nobody reads it where stdout is a full disk
            print(encode_announcement(Announcement(f"{host}:{port}", control)), flush=True)
        await _told_to_stop(running)
        await service.close()
        server.should_exit = True
        await running


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: stopping is ours."""

    def __init__(self, app: object) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _told_to_stop(running: asyncio.Task[None]) -> None:
    """Returns at SIGTERM or SIGINT, or when the HTTP server ended by itself."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
