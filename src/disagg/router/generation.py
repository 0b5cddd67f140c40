"""The endpoints that write text.

A generation, step by step:

    1 who asks, from the headers alone; then read the body, within its limits
    2 on a text thread: JSON → typed request → chat template → token ids → checks against the model's limits
    3 count it against the caller's share; submit; a refusal is an HTTP status
    4 wait for the first event, so that an early failure is an HTTP status too
    5 stream pieces as they come, or collect them; a later failure is an error event and the end of the stream
    6 close: what has not ended is aborted

From 2 on the connection is watched: a client that goes ends the work at once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from disagg.core.errors import DisaggError, RateLimited
from disagg.dispatch.stream import GenerateRequest, GenerationService, ModelStatus, TokensDelivered
from disagg.router.access import Access, Caller
from disagg.router.answer import OpenAnswer
from disagg.router.answer_format import AnswerFormat, AnswerHead, extended
from disagg.router.body import Bodies, Body
from disagg.router.chat import ChatFormat
from disagg.router.choice import ChoiceText, Piece
from disagg.router.completions import CompletionFormat
from disagg.router.fields import JsonObject, read_object
from disagg.router.http_errors import JSON, http_error
from disagg.router.message_format import MessageFormat
from disagg.router.message_reader import MessageReading
from disagg.router.models import ServedModels
from disagg.router.openai_types import SharedParams, read_chat, read_completion
from disagg.router.sse import DONE, DirectBody, EventStream, event, unless_client_goes
from disagg.router.text import ModelText, chat_requests, completion_requests
from disagg.router.timing import AnswerTiming, Timing, time_received
from disagg.telemetry.metrics import REJECTIONS
from disagg.telemetry.stages import Stage

_log = logging.getLogger(__name__)


class Prepared(msgspec.Struct, frozen=True):
    """A request that passed every check this side of the service."""

    params: SharedParams
    requests: tuple[GenerateRequest, ...]
    text: ModelText
    written: tuple[str | None, ...]  # the prompts as the client wrote them; None: as token ids
    reading: MessageReading | None = None  # of chat answers that are more than their text


Prepare = Callable[[JsonObject, Mapping[str, ModelStatus]], Prepared]
Format = type[ChatFormat] | type[CompletionFormat]


def draw_random_seed() -> int:
    return secrets.randbits(63)


class Generation:
    """/v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        service: GenerationService,
        models: ServedModels,
        access: Access,
        text_threads: Executor,
        bodies: Bodies,
        timing: Timing,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._service = service
        self._models = models
        self._access = access
        self._text_threads = text_threads
        self._bodies = bodies
        self._timing = timing
        self._clock = clock
        self._draw_seed = draw_seed

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_chat, ChatFormat, "chatcmpl-")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._prepare_completion, CompletionFormat, "cmpl-")

    async def _generate(self, request: Request, prepare: Prepare, form: Format, prefix: str) -> Response:
        caller = self._access.caller(request.headers)
        received_s = time_received(request.scope)
        timing = self._timing.begin(request.scope["path"], request.headers, received_s)
        body = await self._bodies.read(request)
        try:
            if timing is not None:
                timing.mark(Stage.RECEIVE, time.monotonic())
            work = self._answer(caller, body, received_s, timing, prepare, form, prefix)
            return await unless_client_goes(request.receive, work)
        finally:
            body.release()

    async def _answer(
        self,
        caller: Caller,
        body: Body,
        received_s: float,
        timing: AnswerTiming | None,
        prepare: Prepare,
        form: Format,
        prefix: str,
    ) -> Response:
        statuses, depth = self._models.statuses(), self._bodies.limits.max_depth
        loop = asyncio.get_running_loop()
        work = _noted(lambda: prepare(read_object(body.content, depth), statuses), timing)
        job = await loop.run_in_executor(self._text_threads, work)
        body.release()  # before the answer, which may take minutes
        params, tokenizer = job.params, job.text.tokenizer
        self._admit(caller, job.requests)
        requests = [_of(caller, each) for each in job.requests]
        tracks = timing.open(requests) if timing is not None else ()
        answer = OpenAnswer(self._service, requests, tokenizer, params, job.written, job.reading, tracks, received_s)
        is_handed_over = False

        async def close() -> None:
            await answer.close()
            caller.meter.charge(answer.usage.completion_tokens, time.monotonic())
            if timing is not None:
                self._timing.end(timing)

        try:
            head = AnswerHead(
                id=prefix + answer.name,
                created=int(self._clock()),
                model=params.model,
                has_usage=params.include_usage,
                num_logprobs=params.num_logprobs,
                num_prompt_logprobs=params.num_prompt_logprobs,
            )
            writer = _writer(form, head, job)
            if not params.stream:
                whole = writer.whole(await answer.collect(), answer.usage)
                return Response(extended(whole, timing.extension() if timing else b""), media_type=JSON)
            chunks = _Chunks(answer, writer, params, timing)
            await chunks.open()
            is_handed_over = True
            return EventStream(chunks, close)
        finally:
            if not is_handed_over:
                await close()

    def _admit(self, caller: Caller, requests: Sequence[GenerateRequest]) -> None:
        """Count it against the caller's share. Raises RateLimited."""
        try:
            caller.admit(sum(len(each.prompt_ids) for each in requests), time.monotonic())
        except RateLimited:
            self._service.count(REJECTIONS, "rate_limited")
            raise

    def _prepare_chat(self, body: JsonObject, statuses: Mapping[str, ModelStatus]) -> Prepared:
        request = read_chat(body)
        text = self._models.text(request.params.model)
        requests, plan = chat_requests(request, text, statuses[request.params.model], self._draw_seed())
        return Prepared(request.params, requests, text, (None,), plan.reading)

    def _prepare_completion(self, body: JsonObject, statuses: Mapping[str, ModelStatus]) -> Prepared:
        request = read_completion(body)
        text = self._models.text(request.params.model)
        requests = completion_requests(request, text, statuses[request.params.model], self._draw_seed())
        written = tuple(prompt if isinstance(prompt, str) else None for prompt in request.prompts)
        return Prepared(request.params, requests, text, written)


def _writer(form: Format, head: AnswerHead, job: Prepared) -> AnswerFormat:
    if job.reading is None:
        return form(head, job.text.tokenizer)
    return MessageFormat(head, job.text.tokenizer, job.reading)


def _noted(work: Callable[[], Prepared], timing: AnswerTiming | None) -> Callable[[], Prepared]:
    """The same, that says when a thread had begun and ended it."""
    if timing is None:
        return work

    def noted() -> Prepared:
        timing.mark(Stage.ROUTER_QUEUE, time.monotonic())
        prepared = work()
        timing.mark(Stage.TOKENISE, time.monotonic())
        return prepared

    return noted


def _of(caller: Caller, request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request, priority=caller.priority, slo_class=caller.slo_class, tenant=caller.name, cache_salt=caller.name
    )


class _Chunks:
    """Events of one stream. After a failure an error event is the last one: without [DONE] it is no whole answer."""

    def __init__(
        self, answer: OpenAnswer, writer: AnswerFormat, params: SharedParams, timing: AnswerTiming | None
    ) -> None:
        self._answer = answer
        self._writer = writer
        self._params = params
        self._is_counted = params.continuous_usage  # each piece goes with the counts of its moment
        self._timing = timing
        self._is_timed = timing is None  # nothing more is to be noted of what is written
        self._opening: bytes | None = None
        self._fault: Exception | None = None  # of what was pushed
        self._is_over = False

    async def open(self) -> None:
        """Wait for the first event. Raises the DisaggError with which the answer failed before it."""
        pieces = await self._answer.next_pieces()
        self._opening = self._writer.opening(self._answer.num_choices) + self._written(pieces or ())

    async def next(self) -> bytes | None:
        """What follows; "" when an event shows nothing, None after the last."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return opening
        self._note_written()  # whoever asks for more has written the last
        if self._is_over:
            return None
        try:
            pieces = await self._answer.next_pieces()
            if self._fault is not None:
                raise self._fault
        except Exception as error:
            if not isinstance(error, DisaggError):
                _log.exception("answer %s broke", self._answer.name)
            self._is_over = True
            return event(http_error(error).json)
        if pieces is not None:
            return self._written(pieces)
        self._is_over = True
        usage = self._answer.usage if self._params.include_usage else None
        extension = self._timing.extension() if self._timing is not None else b""
        return (self._writer.closing(usage, extension) if usage or extension else b"") + DONE

    def push_to(self, body: DirectBody) -> None:
        """From now on write what can be shown at once to the body itself, while next() waits."""
        self._answer.push_to(partial(self._push, body))

    def _push(self, body: DirectBody, choice: ChoiceText, event: TokensDelivered) -> bool:
        """False leaves it to next()."""
        if not body.is_ready:
            return False
        try:
            piece = choice.feed(event.tokens, None)
            usage = self._answer.usage if self._is_counted else None
            chunk = self._writer.piece(piece, usage) if piece is not None else b""
            if not self._is_timed:
                self._write_timed(body, choice.index, chunk)
            elif chunk:
                body.write(chunk)
        except Exception as error:  # next() tells it: other streams have tokens in the same step
            self._fault = error
            return False
        return True

    def _write_timed(self, body: DirectBody, index: int, chunk: bytes) -> None:
        self._note_text(index, is_shown=bool(chunk))
        if chunk:
            body.write(chunk)
            self._note_written()

    def _written(self, pieces: Sequence[Piece]) -> bytes:
        usage = self._answer.usage if self._is_counted else None
        written = [self._writer.piece(piece, usage) for piece in pieces]
        if self._timing is not None and not self._is_timed:
            for piece, shown in zip(pieces, written, strict=True):
                self._note_text(piece.index, is_shown=bool(shown))
        return b"".join(written)

    def _note_text(self, index: int, *, is_shown: bool) -> None:
        """More tokens of a choice are here; whether their text goes out with the next write."""
        assert self._timing is not None
        if is_shown:
            self._timing.show(index)
        else:
            self._timing.hold(index)

    def _note_written(self) -> None:
        if self._timing is not None and not self._is_timed:
            self._timing.wrote()
            self._is_timed = self._timing.is_written
