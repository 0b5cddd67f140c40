"""The HTTP application. Everything a client sends is checked here or in `text`; everything it reads is written here.

A generation, step by step:

    1 read the body, up to max_body_bytes
    2 on a text thread: JSON → typed request → chat template → token ids → checks against the model's limits
    3 submit; a refusal is an HTTP status
    4 wait for the first event, so that an early failure is an HTTP status too
    5 stream pieces as they come, or collect them; a later failure is an error event and the end of the stream
    6 close: what has not ended is aborted

From 2 on the connection is watched: a client that goes ends the work at once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from disagg import __version__
from disagg.core.errors import DisaggError, ModelNotFound, Unavailable
from disagg.dispatch.stream import GenerateRequest, GenerationService, ModelStatus
from disagg.router.answer import OpenAnswer
from disagg.router.answer_format import AnswerFormat, AnswerHead, to_json
from disagg.router.chat import ChatFormat
from disagg.router.completions import CompletionFormat
from disagg.router.fields import JsonObject, read_object
from disagg.router.http_errors import JSON, body_too_large, http_error, routing_error
from disagg.router.message_format import MessageFormat
from disagg.router.message_reader import MessageReading
from disagg.router.openai_types import SharedParams, read_chat, read_completion
from disagg.router.request_id import RequestIdHeader
from disagg.router.sse import DONE, ClientGone, EventStream, event, unless_client_goes
from disagg.router.text import ModelText, chat_requests, completion_requests

DEFAULT_MAX_BODY_BYTES: Final = 8 << 20
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NOT_READY_RETRY_S: Final = 2.0
_GONE: Final = 499  # never arrives; names the case in access logs

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Prepared(msgspec.Struct, frozen=True):
    """A request that passed every check this side of the service."""

    params: SharedParams
    requests: tuple[GenerateRequest, ...]
    text: ModelText
    reading: MessageReading | None = None  # of chat answers that are more than their text


Prepare = Callable[[JsonObject, Mapping[str, ModelStatus]], Prepared]
Format = type[ChatFormat] | type[CompletionFormat]


def _draw_seed() -> int:
    return secrets.randbits(63)


def create_app(
    service: GenerationService,
    models: Mapping[str, ModelText],
    *,
    text_threads: Executor,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    clock: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = _draw_seed,
) -> FastAPI:
    """The application over a service.

    `models` are the names clients may ask for. `text_threads` runs templates and tokenizers; its owner shuts it down.
    `clock` gives Unix time in seconds for "created"; `draw_seed` a seed for a request without one.
    """
    front = _Front(service, models, text_threads, max_body_bytes, clock, draw_seed)
    app = FastAPI(title="disagg", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    posts: Mapping[str, Endpoint] = {"/v1/chat/completions": front.chat, "/v1/completions": front.completions}
    gets: Mapping[str, Endpoint] = {
        "/v1/models": front.list_models,
        "/v1/models/{model:path}": front.one_model,
        "/health": front.health,
        "/metrics": front.metrics,
        "/cluster": front.cluster,
        "/version": front.version,
    }
    app.router.routes.extend(Route(path, _guarded(endpoint), methods=["POST"]) for path, endpoint in posts.items())
    app.router.routes.extend(Route(path, _guarded(endpoint), methods=["GET"]) for path, endpoint in gets.items())
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_middleware(RequestIdHeader)
    return app


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Every error becomes a response here: one bad request never costs the connection of another."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=_GONE)
        except DisaggError as error:
            return http_error(error).response()
        except Exception as error:
            _log.exception("%s %s failed", request.method, request.url.path)
            return http_error(error).response()

    return guarded


async def _on_routing_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    response = routing_error(status, request.method, request.url.path).response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


class _BodyTooLarge(Exception):
    """More bytes than the limit."""


class _Front:
    """The endpoints and what they share."""

    def __init__(
        self,
        service: GenerationService,
        models: Mapping[str, ModelText],
        text_threads: Executor,
        max_body_bytes: int,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._service = service
        self._models = models
        self._text_threads = text_threads
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._draw_seed = draw_seed
        self._started_at = int(clock())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_chat, ChatFormat, "chatcmpl-")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_completion, CompletionFormat, "cmpl-")

    async def list_models(self, request: Request) -> Response:
        cards = [self._card(status) for status in self._statuses().values()]
        return _json({"object": "list", "data": cards})

    async def one_model(self, request: Request) -> Response:
        model = str(request.path_params["model"])
        status = self._statuses().get(model)
        if status is None:
            raise self._unknown(model)
        return _json(self._card(status))

    async def health(self, request: Request) -> Response:
        """200 when at least one model can answer, else 503 with what is missing."""
        statuses = list(self._statuses().values())
        states = [{"model": each.model, "is_ready": each.is_ready, "missing": each.missing} for each in statuses]
        if any(each.is_ready for each in statuses):
            return _json({"status": "ok", "models": states})
        missing = "; ".join(f"{each.model}: {each.missing}" for each in statuses) or "no model is served"
        failure = http_error(Unavailable(f"not ready: {missing}", retry_after_s=_NOT_READY_RETRY_S))
        response = failure.response()
        body = {"status": "unavailable", "missing": missing, "models": states, "error": failure.body}
        return Response(to_json(body), 503, {"Retry-After": response.headers["Retry-After"]}, media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics_text(), headers={"Content-Type": _METRICS_TYPE})

    async def cluster(self, request: Request) -> Response:
        return Response(self._service.cluster_json(), media_type=JSON)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    # Generation

    async def _generate(self, request: Request, prepare: Prepare, form: Format, prefix: str) -> Response:
        try:
            body = await self._read_body(request)
        except _BodyTooLarge:
            return body_too_large(self._max_body_bytes).response()
        return await unless_client_goes(request.receive, self._answer(body, prepare, form, prefix))

    async def _answer(self, body: bytes, prepare: Prepare, form: Format, prefix: str) -> Response:
        statuses = self._statuses()
        loop = asyncio.get_running_loop()
        job = await loop.run_in_executor(self._text_threads, lambda: prepare(read_object(body), statuses))
        tokenizer = job.text.tokenizer
        answer = OpenAnswer(self._service, job.requests, tokenizer, job.params.stop)
        is_handed_over = False
        try:
            head = AnswerHead(prefix + answer.name, int(self._clock()), job.params.model, job.params.include_usage)
            writer: AnswerFormat = form(head, tokenizer, job.params.num_logprobs is not None)
            if job.reading is not None:
                writer = MessageFormat(head, tokenizer, job.params.num_logprobs is not None, job.reading)
            if not job.params.stream:
                return Response(writer.whole(await answer.collect(), answer.usage), media_type=JSON)
            opening = await _opening(answer, writer)
            is_handed_over = True
            return EventStream(_chunks(answer, writer, opening, job.params.include_usage), answer.close)
        finally:
            if not is_handed_over:
                await answer.close()

    def _prepare_chat(self, body: JsonObject, statuses: Mapping[str, ModelStatus]) -> Prepared:
        request = read_chat(body)
        text, status = self._find(request.params.model, statuses)
        requests, plan = chat_requests(request, text, status, self._draw_seed())
        return Prepared(request.params, requests, text, plan.reading)

    def _prepare_completion(self, body: JsonObject, statuses: Mapping[str, ModelStatus]) -> Prepared:
        request = read_completion(body)
        text, status = self._find(request.params.model, statuses)
        return Prepared(request.params, completion_requests(request, text, status, self._draw_seed()), text)

    async def _read_body(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size = 0
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            raise _BodyTooLarge
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise _BodyTooLarge
            parts.append(part)
        return b"".join(parts)

    # Models

    def _statuses(self) -> dict[str, ModelStatus]:
        """Served models in the order they were named. One the service does not know yet is not ready."""
        known = {status.model: status for status in self._service.models()}
        return {
            model: known.get(model, ModelStatus(model, False, "the service does not know this model", None))
            for model in self._models
        }

    def _find(self, model: str, statuses: Mapping[str, ModelStatus]) -> tuple[ModelText, ModelStatus]:
        if model not in self._models:
            raise self._unknown(model)
        return self._models[model], statuses[model]

    def _unknown(self, model: str) -> ModelNotFound:
        served = ", ".join(self._models) or "none"
        return ModelNotFound(f"the model {model!r} is not served here; served: {served}", param="model")

    def _card(self, status: ModelStatus) -> dict[str, object]:
        return {
            "id": status.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "disagg",
            "max_model_len": status.max_context,
        }


async def _opening(answer: OpenAnswer, writer: AnswerFormat) -> bytes:
    """The first bytes of a stream, once the first event is there."""
    pieces = await answer.next_pieces()
    return writer.opening(answer.num_choices) + b"".join(writer.piece(piece) for piece in pieces or ())


async def _chunks(
    answer: OpenAnswer, writer: AnswerFormat, opening: bytes, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Events of one stream. After a failure an error event is the last one: without [DONE] it is no whole answer."""
    if opening:
        yield opening
    try:
        while (pieces := await answer.next_pieces()) is not None:
            for piece in pieces:
                yield writer.piece(piece)
    except Exception as error:
        if not isinstance(error, DisaggError):
            _log.exception("answer %s broke", answer.name)
        yield event(http_error(error).json)
        return
    yield (writer.usage(answer.usage) if include_usage else b"") + DONE


def _json(value: object) -> Response:
    return Response(to_json(value), media_type=JSON)
