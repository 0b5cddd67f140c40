"""The HTTP application: which endpoint answers where, and what every answer has in common.

Everything a client sends is checked in the files of the endpoints (`generation`, `information`) or in `text`.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.core.errors import DisaggError
from disagg.dispatch.stream import GenerationService
from disagg.router.access import Access
from disagg.router.body import DEFAULT_LIMITS, Bodies, BodyLimits
from disagg.router.description import Described
from disagg.router.generation import Generation, draw_random_seed
from disagg.router.http_errors import Refused, http_error, routing_error, unsupported_endpoint
from disagg.router.information import Information
from disagg.router.models import ServedModels
from disagg.router.request_id import RequestIdHeader
from disagg.router.sse import ClientGone
from disagg.router.text import ModelText
from disagg.router.timelines import Timelines
from disagg.router.timing import Timing
from disagg.telemetry.metrics import HTTP_ERRORS

# Parts of OpenAI's API that are not here, by the first word after /v1/.
UNSUPPORTED: Final = (
    "assistants",
    "audio",
    "batches",
    "embeddings",
    "files",
    "fine_tuning",
    "images",
    "moderations",
    "realtime",
    "responses",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)
_GONE: Final = 499  # never arrives; names the case in access logs

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    service: GenerationService,
    models: Mapping[str, ModelText],
    *,
    text_threads: Executor,
    limits: BodyLimits = DEFAULT_LIMITS,
    access: Access | None = None,
    cors_origins: Sequence[str] = (),
    timing: Timing | None = None,
    clock: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = draw_random_seed,
) -> ASGIApp:
    """The application over a service.

    `models` are the names clients may ask for. `text_threads` runs templates and tokenizers; its owner shuts it down.
    Without `access` nobody needs a key. Pages of `cors_origins` may ask from a browser ("*": of all). Without `timing`
    no timeline is kept: only answers whose requests ask for theirs show it.
    `clock` gives Unix time in seconds for "created"; `draw_seed` a seed for a request without one.
    """
    made = endpoints(
        service,
        models,
        text_threads,
        limits=limits,
        access=access,
        timing=timing,
        clock=clock,
        draw_seed=draw_seed,
    )
    errors = _ErrorCount(service)
    routes = [Route(path, _Guarded(endpoint, errors), methods=[method]) for method, path, endpoint in made]
    app: ASGIApp = _Site(Router(routes, redirect_slashes=False), errors)
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIdHeader(app)


class _ErrorCount:
    """Answers that are errors, by status. An endpoint that says 503 by itself, as /ready does, is none."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    def counted(self, response: Response) -> Response:
        self._service.count(HTTP_ERRORS, str(response.status_code))
        return response


class _Site:
    """Routes, and an error object for what is nowhere. Nothing else stands between an endpoint and the socket."""

    def __init__(self, router: Router, errors: _ErrorCount) -> None:
        self._router = router
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # the router then raises instead of answering in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            response = self._errors.counted(_routing_error(Request(scope), error))
            await response(scope, receive, send)


def endpoints(
    service: GenerationService,
    models: Mapping[str, ModelText],
    text_threads: Executor,
    *,
    limits: BodyLimits = DEFAULT_LIMITS,
    access: Access | None = None,
    timing: Timing | None = None,
    clock: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = draw_random_seed,
) -> tuple[tuple[str, str, Endpoint], ...]:
    """(method, path, who answers): all there is. Arguments as of create_app."""
    access = access or Access()
    timing, bodies = timing or Timing(0, clock), Bodies(limits)
    served = ServedModels(service, models)
    writing = Generation(service, served, access, text_threads, bodies, timing, clock, draw_seed)
    telling = Information(service, served, access, text_threads, bodies, clock)
    timelines = Timelines(access, timing.store, text_threads)
    made: tuple[tuple[str, str, Endpoint], ...] = (
        ("POST", "/v1/chat/completions", writing.chat),
        ("POST", "/v1/completions", writing.completions),
        ("GET", "/v1/models", telling.list_models),
        ("GET", "/v1/models/{model:path}", telling.one_model),
        ("POST", "/tokenize", telling.tokenize),
        ("POST", "/detokenize", telling.detokenize),
        ("GET", "/health", telling.health),
        ("GET", "/ready", telling.ready),
        ("GET", "/metrics", telling.metrics),
        ("GET", "/cluster", telling.cluster),
        ("GET", "/timeline", timelines.last),
        ("GET", "/timeline/{request_id}", timelines.one),
        ("GET", "/version", telling.version),
    )
    told = Described([(method, path) for method, path, _ in made])
    return (*made, ("GET", told.PATH, told.answer))


class _Guarded:
    """Every error becomes a response here: one bad request never costs the connection of another.

    An application by itself, so that nothing is wrapped around each chunk that its response sends.
    """

    def __init__(self, endpoint: Endpoint, errors: _ErrorCount) -> None:
        self._endpoint = endpoint
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._endpoint(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=_GONE)
        except Refused as refusal:
            response = refusal.error.response()
        except DisaggError as error:
            response = http_error(error).response()
        except Exception as error:
            _log.exception("%s %s failed", request.method, request.url.path)
            response = http_error(error).response()
        return self._errors.counted(response)


def _routing_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    if path.startswith("/v1/") and path.split("/")[2] in UNSUPPORTED:
        return unsupported_endpoint(path).response()
    response = routing_error(error.status_code, request.method, path).response()
    if error.headers:
        response.headers.update(error.headers)
    return response
