"""The endpoints that write no text: models, tokens, state, metrics."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from disagg import __version__
from disagg.core.errors import Unavailable
from disagg.dispatch.stream import GenerationService, ModelStatus
from disagg.router.access import Access
from disagg.router.answer_format import to_json
from disagg.router.body import Bodies
from disagg.router.fields import JsonObject, read_object
from disagg.router.http_errors import JSON, http_error
from disagg.router.models import ServedModels
from disagg.router.tokens import detokenize, tokenize
from disagg.telemetry.exposition import CONTENT_TYPE

_NOT_READY_RETRY_S: Final = 2.0


class Information:
    """Everything but generation."""

    def __init__(
        self,
        service: GenerationService,
        models: ServedModels,
        access: Access,
        text_threads: Executor,
        bodies: Bodies,
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._models = models
        self._access = access
        self._text_threads = text_threads
        self._bodies = bodies
        self._started_at = int(clock())

    async def list_models(self, request: Request) -> Response:
        self._access.caller(request.headers)
        cards = [self._card(status) for status in self._models.statuses().values()]
        return _json({"object": "list", "data": cards})

    async def one_model(self, request: Request) -> Response:
        self._access.caller(request.headers)
        model = str(request.path_params["model"])
        status = self._models.statuses().get(model)
        if status is None:
            raise self._models.unknown(model)
        return _json(self._card(status))

    async def tokenize(self, request: Request) -> Response:
        return await self._on_text_thread(request, lambda body: tokenize(body, self._models))

    async def detokenize(self, request: Request) -> Response:
        return await self._on_text_thread(request, lambda body: detokenize(body, self._models))

    async def health(self, request: Request) -> Response:
        """200 while this process answers at all: restarting it would cure nothing. Says how each model stands."""
        missing, models = self._state()
        return _json({"status": "ok", "ready": not missing, "missing": missing, "models": models})

    async def ready(self, request: Request) -> Response:
        """200 when at least one model can answer, else 503 with what is missing."""
        missing, models = self._state()
        if not missing:
            return _json({"status": "ok", "models": models})
        failure = http_error(Unavailable(f"not ready: {missing}", retry_after_s=_NOT_READY_RETRY_S))
        response = failure.response()
        body = {"status": "unavailable", "missing": missing, "models": models, "error": failure.body}
        return Response(to_json(body), 503, {"Retry-After": response.headers["Retry-After"]}, media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics_text(), headers={"Content-Type": CONTENT_TYPE})

    async def cluster(self, request: Request) -> Response:
        return Response(self._service.cluster_json(), media_type=JSON)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    def _state(self) -> tuple[str, list[dict[str, object]]]:
        """What is missing ("" once any model can answer), and each model's state."""
        statuses = list(self._models.statuses().values())
        states: list[dict[str, object]] = [
            {"model": each.model, "is_ready": each.is_ready, "missing": each.missing} for each in statuses
        ]
        if any(each.is_ready for each in statuses):
            return "", states
        return "; ".join(f"{each.model}: {each.missing}" for each in statuses) or "no model is served", states

    async def _on_text_thread(self, request: Request, work: Callable[[JsonObject], object]) -> Response:
        self._access.caller(request.headers)
        body, depth = await self._bodies.read(request), self._bodies.limits.max_depth
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._text_threads, lambda: _json(work(read_object(body.content, depth))))
        finally:
            body.release()

    def _card(self, status: ModelStatus) -> dict[str, object]:
        return {
            "id": status.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "disagg",
            "max_model_len": status.max_context,
        }


def _json(value: object) -> Response:
    return Response(to_json(value), media_type=JSON)
