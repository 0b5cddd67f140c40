"""Requests of every kind, their answers, and whether two answers are the same."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

REQUEST_TIMEOUT_S = 120.0
LONG_SHARE = 0.2  # of the answers


class Question(msgspec.Struct, frozen=True):
    """One request body; the same question has the same answer, whatever dies meanwhile."""

    body: dict[str, Any]
    kind: str  # "greedy", "seeded", "two choices", each streamed or not

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Outcome(msgspec.Struct):
    """What a client saw. answer: per choice (text, finish reason, logprobs of the tokens), and usage."""

    answer: dict[int, list[Any]] = msgspec.field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str | None = None
    is_aborted: bool = False
    started_s: float = 0.0
    piece_times_s: list[float] = msgspec.field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return self.piece_times_s[0] - self.started_s if self.piece_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.piece_times_s, self.piece_times_s[1:], strict=False)]


def draw_questions(rng: random.Random, model: str, num_questions: int, max_prompt: int, vocab: int) -> list[Question]:
    """Prompts are token ids, so that any tokenizer serves; half of them share a prefix."""
    shared = [rng.randrange(3, vocab) for _ in range(max_prompt // 2)]
    questions = []
    for _ in range(num_questions):
        prompt = shared[: rng.choice([0, len(shared)])]
        prompt = prompt + [rng.randrange(3, vocab) for _ in range(rng.randint(1, max_prompt // 2))]
        kind = rng.choice(["greedy", "seeded", "two choices"])
        # Some answers grow far beyond the room that is taken at their start.
        max_tokens = rng.randint(100, 200) if rng.random() < LONG_SHARE else rng.randint(1, 60)
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 1}
        body["ignore_eos"] = True
        body["temperature"] = 0.0 if kind == "greedy" else 0.9
        body["seed"] = rng.randrange(2**31)
        body["n"] = 2 if kind == "two choices" else 1
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        questions.append(Question(body, f"{kind}, {'streamed' if 'stream' in body else 'whole'}"))
    return questions


async def ask(
    client: httpx.AsyncClient,
    question: Question,
    abort_after_s: float | None = None,
    on_piece: Callable[[int], None] = lambda num_pieces: None,
) -> Outcome:
    """Ask once; every end is an Outcome. With abort_after_s the client leaves then, if it is not answered.

    on_piece: called after each piece of a stream with how many there were so far.
    """
    outcome = Outcome(started_s=time.monotonic())
    try:
        async with asyncio.timeout(abort_after_s if abort_after_s is not None else REQUEST_TIMEOUT_S):
            await _ask(client, question, outcome, on_piece)
    except TimeoutError:
        outcome.is_aborted = abort_after_s is not None
        outcome.error = None if outcome.is_aborted else f"no answer within {REQUEST_TIMEOUT_S:g} s"
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _ask(
    client: httpx.AsyncClient, question: Question, outcome: Outcome, on_piece: Callable[[int], None]
) -> None:
    if not question.is_streamed:
        response = await client.post("/v1/completions", json=question.body)
        outcome.piece_times_s.append(time.monotonic())
        _take(msgspec.json.decode(response.content), outcome)
        return
    is_done = False
    async with client.stream("POST", "/v1/completions", json=question.body) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                outcome.piece_times_s.append(time.monotonic())
                _take(msgspec.json.decode(line[6:]), outcome)
                on_piece(len(outcome.piece_times_s))
            elif line.startswith("{"):
                _take(msgspec.json.decode(line), outcome)
    if not is_done and outcome.error is None:
        outcome.error = "the stream ended without [DONE]"


def _take(body: dict[str, Any], outcome: Outcome) -> None:
    if "error" in body:
        outcome.error = str(body["error"].get("message"))
        return
    for choice in body["choices"]:
        seen = outcome.answer.setdefault(choice["index"], ["", None, []])
        seen[0] += choice["text"]
        seen[1] = choice["finish_reason"] or seen[1]
        if choice.get("logprobs"):
            seen[2] += choice["logprobs"]["token_logprobs"]
    if body.get("usage"):
        outcome.usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


def is_same(outcome: Outcome, reference: Outcome) -> bool:
    """Text, finish reasons, every log-probability, usage."""
    return outcome.answer == reference.answer and outcome.usage == reference.usage


def is_longer(outcome: Outcome, reference: Outcome) -> bool:
    """More tokens than the undisturbed answer has: some came twice."""
    return any(
        len(seen[2]) > len(reference.answer[choice][2])
        for choice, seen in outcome.answer.items()
        if choice in reference.answer
    )
