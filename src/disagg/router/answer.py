"""One HTTP request's answers: submits a request for each prompt, merges their events, turns tokens into pieces of text.

submit        all prompts, or none: a refusal takes back what was submitted before it
next_pieces   waits for one event; [] when it shows nothing yet, None after the last one
push_to       tokens of an answer that is one text, the moment they come, while next_pieces waits
close         aborts what has not ended; always called, whether the client is there or not
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from disagg.core.errors import DisaggError, InternalFault
from disagg.core.request import FinishReason
from disagg.dispatch.stream import (
    GenerateRequest,
    GenerationService,
    RequestFailed,
    StreamEvent,
    TokensDelivered,
    TokenStream,
)
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.choice import ChoiceText, EchoedPrompt, Piece, TokenEntry
from disagg.router.message_reader import MessageReading
from disagg.router.openai_types import SharedParams
from disagg.router.reasoning import ThoughtCounter
from disagg.router.stop_strings import StopAutomaton
from disagg.telemetry.track import RequestTrack

_MAX_MERGED: Final = 64  # events that wait for a slow client, before the streams themselves hold them


class Usage(msgspec.Struct, frozen=True):
    """Token counts over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # of the completion's; None: thoughts are not told from the rest


class WholeChoice(msgspec.Struct, frozen=True):
    """One finished choice of an answer that is not streamed."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: FinishReason
    prompt: EchoedPrompt | None = None  # where its log probabilities are wanted


class OpenAnswer:
    """The open streams behind one HTTP request. Choice i of prompt p has index p * num_choices + i."""

    def __init__(
        self,
        service: GenerationService,
        requests: Sequence[GenerateRequest],
        tokenizer: ModelTokenizer,
        params: SharedParams,
        texts: Sequence[str | None],
        reading: MessageReading | None = None,
        tracks: Sequence[RequestTrack] = (),
        received_s: float | None = None,
    ) -> None:
        """Submit everything. Raises what the service raises; then nothing stays submitted.

        `texts` are the prompts as the client wrote them, None where it gave token ids; `reading` is how a chat's answer
        is read; `tracks` are of the same prompts, where their times are to be noted. received_s: as of submit().
        """
        self._params = params
        self._prompts = [EchoedPrompt(each.prompt_ids, text, None) for each, text in zip(requests, texts, strict=True)]
        self._held: dict[int, list[TokensDelivered]] = {}  # by prompt: what came before the prompt's scores
        self._num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self._num_choices = requests[0].num_choices
        self._tracked = [choice for track in tracks for choice in track.choices]
        self._streams = _submit_all(service, requests, tracks, received_s)
        self._events: _Events = _SingleEvents(self._streams[0]) if len(self._streams) == 1 else _Merged(self._streams)
        stops = StopAutomaton(params.stop) if params.stop else None
        ends = requests[0].sampling.stop_token_ids
        shown_ids = _shown_ids(reading, tokenizer)
        self._choices = [
            ChoiceText(
                index,
                tokenizer,
                stops,
                ends,
                min_tokens=params.min_tokens,
                is_prompt_only=params.is_prompt_only,
                thoughts=_thought_counter(reading),
                shown_ids=shown_ids,
            )
            for index in range(self._num_choices * len(requests))
        ]
        self._unechoed = set(range(len(self._choices))) if params.echo else set()
        self._is_shown_as_it_comes = not params.echo and params.num_scored is None
        self._has_ended = False

    @property
    def name(self) -> str:
        """Names the answer in logs of every process: the first stream's request id."""
        return str(self._streams[0].request_id)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        thought = [choice.num_thought_tokens for choice in self._choices if choice.num_thought_tokens is not None]
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(stream.num_cached_tokens for stream in self._streams),
            reasoning_tokens=sum(thought) if thought else None,
        )

    async def next_pieces(self) -> list[Piece] | None:
        """Wait for the next event; what else is here by then comes with it, so that a step is one write.

        Raises the DisaggError with which a stream failed.
        """
        found = await self._events.next()
        if found is None:
            self._has_ended = True
            unfinished = [choice.index for choice in self._choices if choice.finish_reason is None]
            if unfinished:
                raise InternalFault(f"answer {self.name} ended, but its choices {unfinished} did not finish")
            return None
        pieces = self._pieces(*found)
        if not self._params.continuous_usage:  # else each piece goes with the counts of its own moment
            for number, event in self._events.ready():
                pieces += self._pieces(number, event)
        return pieces

    def _pieces(self, number: int, event: StreamEvent) -> list[Piece]:
        if isinstance(event, RequestFailed):
            raise event.error
        if self._is_shown_as_it_comes:
            return self._show(number, event)
        return [piece for each in self._take(number, event) for piece in self._show(number, each)]

    def _take(self, number: int, event: TokensDelivered) -> list[TokensDelivered]:
        """Events of prompt `number` that can be shown now: nothing is, before the scores of its prompt are here."""
        if self._params.num_scored is None or self._prompts[number].scores is not None:
            return [event]
        scores = event.tokens[0].prompt_logprobs if event.tokens else None
        held = self._held.setdefault(number, [])
        if scores is None:
            held.append(event)
            return []
        self._prompts[number] = msgspec.structs.replace(self._prompts[number], scores=scores)
        del self._held[number]
        return [event, *held]

    def _show(self, number: int, event: TokensDelivered) -> list[Piece]:
        choice = self._choices[number * self._num_choices + event.choice]
        pieces: list[Piece] = []
        if choice.index in self._unechoed:
            self._unechoed.discard(choice.index)
            prompt = self._prompts[number]
            is_scored = self._params.num_logprobs is not None
            pieces.append(choice.echo(prompt if is_scored else msgspec.structs.replace(prompt, scores=None)))
        was_finished = choice.finish_reason is not None
        piece = choice.feed(event.tokens, event.finish_reason)
        if choice.is_stopped_by_text and not was_finished and event.finish_reason is None:
            self._streams[number].finish_choice(event.choice)
        if piece is not None:
            return [*pieces, piece]
        if self._tracked:
            self._tracked[choice.index].is_held = True
        return pieces

    def push_to(self, take: Callable[[ChoiceText, TokensDelivered], bool]) -> None:
        """Offer `take` tokens the moment they come, while next_pieces() waits. What it takes it feeds to their choice.

        Only of an answer that is one text and ends with its tokens: others go on as they were.
        """
        if len(self._choices) == 1 and self._is_shown_as_it_comes and not self._params.stop:
            self._streams[0].push_to(partial(take, self._choices[0]))

    async def collect(self) -> list[WholeChoice]:
        """Wait for the whole answer."""
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        while (found := await self.next_pieces()) is not None:
            for piece in found:
                pieces[piece.index].append(piece)
        return [self._join(parts) for parts in pieces]

    def _join(self, pieces: Sequence[Piece]) -> WholeChoice:
        reason = pieces[-1].finish_reason
        assert reason is not None  # next_pieces has checked that every choice finished
        entries = tuple(entry for piece in pieces for entry in piece.entries)
        is_scored = self._params.num_prompt_logprobs is not None
        prompt = self._prompts[pieces[0].index // self._num_choices] if is_scored else None
        text = "".join(piece.text for piece in pieces)
        return WholeChoice(pieces[0].index, text, entries, reason, prompt)

    async def close(self) -> None:
        """Abort whatever has not ended. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            for stream in self._streams:
                stream.abort()
        await self._events.close()

    def check_invariants(self) -> None:
        """Raises AssertionError when choices and streams do not fit together."""
        assert len(self._choices) == self._num_choices * len(self._streams)
        assert self._params.num_scored is not None or not self._held
        for choice in self._choices:
            choice.check_invariants()


def _thought_counter(reading: MessageReading | None) -> ThoughtCounter | None:
    if reading is None or not reading.is_thinking:
        return None
    return ThoughtCounter(is_open=reading.is_open)


def _shown_ids(reading: MessageReading | None, tokenizer: ModelTokenizer) -> frozenset[int]:
    """Marks that are looked for in a text must be in it, also those that are special tokens of their model."""
    if reading is None:
        return frozenset()
    return frozenset(token.id for token in tokenizer.vocabulary.added if token.content in reading.marks)


def _submit_all(
    service: GenerationService,
    requests: Sequence[GenerateRequest],
    tracks: Sequence[RequestTrack],
    received_s: float | None,
) -> list[TokenStream]:
    streams: list[TokenStream] = []
    try:
        for number, request in enumerate(requests):
            streams.append(service.submit(request, tracks[number] if tracks else None, received_s))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


class _Events(Protocol):
    """Events of some streams, each with its stream's number; None at the end."""

    async def next(self) -> tuple[int, StreamEvent] | None: ...

    def ready(self) -> list[tuple[int, StreamEvent]]:
        """Those that need no waiting, after next() has given one."""

    async def close(self) -> None: ...


class _SingleEvents:
    """The common case, without a task or queue in between."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._iterator: AsyncIterator[StreamEvent] = stream.events()

    async def next(self) -> tuple[int, StreamEvent] | None:
        try:
            return 0, await self._iterator.__anext__()
        except StopAsyncIteration:
            return None

    def ready(self) -> list[tuple[int, StreamEvent]]:
        return [(0, event) for event in self._stream.take_ready()]

    async def close(self) -> None:
        await _close_iterator(self._iterator)


class _Merged:
    """One task for each stream feeds a bounded queue."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._queue: asyncio.Queue[tuple[int, StreamEvent] | None] = asyncio.Queue(_MAX_MERGED)
        self._num_open = len(streams)
        self._tasks = [asyncio.create_task(self._pump(number, stream)) for number, stream in enumerate(streams)]

    async def next(self) -> tuple[int, StreamEvent] | None:
        while self._num_open:
            found = await self._queue.get()
            if found is not None:
                return found
            self._num_open -= 1
        return None

    def ready(self) -> list[tuple[int, StreamEvent]]:
        return []

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, number: int, stream: TokenStream) -> None:
        iterator = stream.events()
        try:
            async for event in iterator:
                await self._queue.put((number, event))
        except Exception as error:
            # A stream that raises instead of reporting must not leave the client waiting.
            fault = error if isinstance(error, DisaggError) else InternalFault(f"a token stream broke: {error!r}")
            await self._queue.put((number, RequestFailed(fault)))
        finally:
            await _close_iterator(iterator)
        await self._queue.put(None)


async def _close_iterator(iterator: AsyncIterator[StreamEvent]) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()
