"""Main of a router process: tokenizers, control port for workers, HTTP for clients, until told to stop."""

import asyncio
import contextlib
import logging
import secrets
import signal
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp

from disagg.channel.garbage import collect_rarely
from disagg.channel.keys import load_keys
from disagg.channel.lifeline import watch_parent
from disagg.core.endpoints import join_address
from disagg.core.errors import ConfigurationError
from disagg.core.ids import MAX_INCARNATION, Incarnation
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.modelfiles.fetch import resolve_model
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.policy.recovery import RecoveryLimits
from disagg.router.access import Access, load_access
from disagg.router.app import create_app
from disagg.router.body import BodyLimits
from disagg.router.config import Announcement, RouterConfig, encode_announcement
from disagg.router.connection import ConnectionLimits
from disagg.router.decision_file import DecisionFile
from disagg.router.listening import listen
from disagg.router.server import HttpServer, TlsFiles, raise_descriptor_limit
from disagg.router.service import LiveService
from disagg.router.text import ModelText
from disagg.router.timing import Export, Timing
from disagg.telemetry.decision_log import DecisionLog

TEXT_THREADS = 2


def run_router(config: RouterConfig) -> int:
    """Blocking; 0 when told to stop. Raises ConfigurationError when the configuration cannot work."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    lifeline = watch_parent()
    try:
        access = load_access(config.api_keys, config.api_keys_file)
        raise_descriptor_limit()
        texts = {name: _model_text(path, config) for name, path in config.models}
        collect_rarely()
        asyncio.run(_serve(config, texts, access))
    finally:
        if lifeline is not None:
            lifeline.close()
    return 0


def _model_text(path: str, config: RouterConfig) -> ModelText:
    tokenizer = load_tokenizer(resolve_model(path))
    return ModelText(tokenizer, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser)


async def _serve(config: RouterConfig, texts: dict[str, ModelText], access: Access) -> None:
    dispatcher_config = DispatcherConfig(
        incarnation=Incarnation(secrets.randbelow(MAX_INCARNATION)),
        tokenizer_digests={name: text.tokenizer.digest for name, text in texts.items()},
        local_prefill_tokens=config.local_prefill_tokens,
        max_open_requests=config.max_open_requests,
        recovery=RecoveryLimits(max_queue_s=config.max_queue_s),
    )
    export = _load_export() if config.otel else None
    timing = Timing(config.keep_timelines, time.time, export)
    file = DecisionFile(config.decision_log) if config.decision_log else None
    log = DecisionLog(file.write, dispatcher_config) if file is not None else None
    dispatcher = Dispatcher(dispatcher_config, log.decided) if log is not None else Dispatcher(dispatcher_config)
    service = LiveService(
        dispatcher, beat_interval_s=config.beat_interval_s, keys=load_keys(config.keys), decision_log=log
    )
    try:
        await _serve_http(config, texts, access, service, timing)
    finally:
        if export is not None:
            await asyncio.get_running_loop().run_in_executor(None, export.close)
        if file is not None:
            file.close()


def _load_export() -> Export:
    """Raises ConfigurationError where the library is not installed."""
    try:
        from disagg.router.tracing import export_by_environment
    except ImportError as error:
        text = f"--otel needs a library that is not here ({error.name}): pip install 'disagg[otel]'"
        raise ConfigurationError(text) from None
    return export_by_environment()


async def _serve_http(
    config: RouterConfig, texts: dict[str, ModelText], access: Access, service: LiveService, timing: Timing
) -> None:
    http = listen(config.host, config.port)
    try:
        control = await service.listen(config.control_host, config.control_port)
    except OSError as error:
        http.close()
        where = f"{config.control_host}:{config.control_port}"
        text = f"cannot listen on {where}: {error.strerror or error}; choose another --control-port"
        raise ConfigurationError(text) from None
    with ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text") as threads:
        app = create_app(
            service,
            texts,
            text_threads=threads,
            limits=BodyLimits(config.max_body_bytes, config.max_json_depth, config.body_timeout_s),
            access=access,
            cors_origins=config.cors_origins,
            timing=timing,
        )
        server = _http_server(config, app)
        running = asyncio.create_task(server.serve(sockets=[http]))
        address = join_address(*http.getsockname()[:2])
        with contextlib.suppress(OSError):  # nobody reads it where stdout is a full disk
            print(
                encode_announcement(Announcement(address, control, "https" if config.tls_cert else "http")),
                flush=True,
            )
        await _told_to_stop(running)
        await service.close()
        server.should_exit = True
        await running


def _http_server(config: RouterConfig, app: ASGIApp) -> HttpServer:
    tls = TlsFiles(config.tls_cert, config.tls_key) if config.tls_cert else None
    limits = ConnectionLimits(header_timeout_s=config.header_timeout_s, write_timeout_s=config.write_timeout_s)
    server = HttpServer(app, limits, tls)
    try:
        server.config.load()
    except (OSError, ssl.SSLError) as error:
        text = f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used: {error}"
        raise ConfigurationError(text) from None
    return server


async def _told_to_stop(running: asyncio.Task[None]) -> None:
    """Returns at SIGTERM or SIGINT, or when the HTTP server ended by itself."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
