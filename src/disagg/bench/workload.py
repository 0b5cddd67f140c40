"""What is asked of a system, and when: the same description drives a simulation and a live benchmark.

A prompt is a chain of runs (label, length). Prompts whose chains begin alike share that prefix, token by token; a run
cut short shares what is left of it. So prefix sharing is described without text, and token ids are made on demand.

A workload is a stream of requests. Open loop: each is due at its time. Closed loop and sessions: some are due a while
after another has ended, so whoever drives the stream says when that was.
"""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from disagg.bench.arrivals import Arrivals
from disagg.core.errors import ConfigurationError

ANSWER_LABEL = 1  # every token of an answer, so that the next turn's prompt can name them; the rest of a run is 0
FIRST_LABEL = 2


class Run(NamedTuple):
    """num_tokens tokens of a prompt. Equal labels in equal places begin with equal tokens."""

    label: int
    num_tokens: int


class WorkRequest(msgspec.Struct, frozen=True):
    """One request. number: the n-th of its workload, and what results are kept under."""

    number: int
    due_s: float  # from the start
    runs: tuple[Run, ...]
    num_output_tokens: int
    model: str = ""
    priority: int = 0
    session: int = -1  # of which it is a turn; -1: none

    @property
    def num_prompt_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


def prompt_ids(runs: tuple[Run, ...]) -> tuple[int, ...]:
    """Token ids: each run begins with its label, which names it, and goes on with zeros; an answer is all one token."""
    parts: list[int] = []
    for label, num_tokens in runs:
        if label == ANSWER_LABEL:
            parts.extend((ANSWER_LABEL,) * num_tokens)
        elif num_tokens:
            parts.append(label)
            parts.extend((0,) * (num_tokens - 1))
    return tuple(parts)


class WorkStream(Protocol):
    """A workload while it runs. Pull the next request that a clock decides; report each end, which may cause more."""

    def next_request(self) -> WorkRequest | None:
        """In order of due_s; None when there is none left that depends on the clock alone."""

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        """Called once for each request that has ended, `now_s` after the start; is_whole: with its whole answer."""


class Workload(Protocol):
    """A description of work. start() gives the same stream for the same generator state."""

    def start(self, rng: random.Random) -> WorkStream: ...


# --- lengths ------------------------------------------------------------------------------------------------------


class Lengths(msgspec.Struct, frozen=True):
    """Numbers of tokens: fixed (spread 0), uniform on mean +- spread, or log-normal with that standard deviation.

    Draws are cut to [least, most].
    """

    mean: float
    spread: float = 0.0
    is_lognormal: bool = False
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.mean > 0 or self.spread < 0 or not 1 <= self.least <= self.most:
            text = f"lengths of mean {self.mean:g}, spread {self.spread:g}, from {self.least} to {self.most}"
            raise ConfigurationError(f"{text}: the mean must be above 0, the spread 0 or more, the least 1 or more")

    def draw(self, rng: random.Random) -> int:
        if not self.spread:
            value = self.mean
        elif self.is_lognormal:
            variance = math.log(1 + (self.spread / self.mean) ** 2)
            value = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        else:
            value = rng.uniform(self.mean - self.spread, self.mean + self.spread)
        return min(self.most, max(self.least, round(value)))


class PrefixPool(msgspec.Struct, frozen=True):
    """Shared beginnings of prompts: num_prefixes of num_tokens each; a prompt has one with probability `share`."""

    num_prefixes: int = 0
    num_tokens: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.num_prefixes < 0 or self.num_tokens < 0 or not 0 <= self.share <= 1:
            text = f"{self.num_prefixes} shared prefixes of {self.num_tokens} tokens for a share of {self.share:g}"
            raise ConfigurationError(f"{text}: numbers must be 0 or more, the share from 0 to 1")

    def draw(self, rng: random.Random) -> tuple[Run, ...]:
        if not self.num_prefixes or rng.random() >= self.share:
            return ()
        return (Run(FIRST_LABEL + rng.randrange(self.num_prefixes), self.num_tokens),)


# --- workloads ----------------------------------------------------------------------------------------------------


class RandomWork(msgspec.Struct, frozen=True, kw_only=True):
    """num_requests independent requests of drawn lengths, open loop."""

    num_requests: int
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    prefixes: PrefixPool = PrefixPool()
    models: tuple[str, ...] = ("",)  # drawn evenly

    def start(self, rng: random.Random) -> WorkStream:
        return OpenStream(self._requests(rng))

    def _requests(self, rng: random.Random) -> Iterator[WorkRequest]:
        for number, due_s in zip(range(self.num_requests), self.arrivals.times_s(rng), strict=False):
            yield self.draw(number, due_s, rng)

    def draw(self, number: int, due_s: float, rng: random.Random) -> WorkRequest:
        """The n-th request, whose own part no other request has."""
        shared = self.prefixes.draw(rng)
        own = Run(FIRST_LABEL + self.prefixes.num_prefixes + number, self.prompt.draw(rng))
        model = self.models[0] if len(self.models) == 1 else rng.choice(self.models)
        return WorkRequest(number, due_s, (*shared, own), self.output.draw(rng), model)


class ClosedWork(msgspec.Struct, frozen=True):
    """The same requests, but num_clients of them at once: the next comes think_s after one has ended."""

    work: RandomWork  # its arrivals are not used
    num_clients: int
    think_s: float = 0.0

    def start(self, rng: random.Random) -> WorkStream:
        if self.num_clients < 1:
            raise ConfigurationError(f"{self.num_clients} clients: at least 1 must ask")
        return _ClosedStream(self, rng)


class SessionWork(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations: each turn's prompt is all that was said so far and a new message, think_s after the answer.

    Sessions begin by the arrivals' clock; of a closed loop each client's next one begins think_s after its last one.
    A turn that failed is the session's last.
    """

    num_sessions: int
    arrivals: Arrivals
    num_turns: Lengths
    system: PrefixPool = PrefixPool()
    message: Lengths
    output: Lengths
    think_s: float = 5.0  # mean, exponential
    max_prompt_tokens: int = 1 << 20  # a session ends rather than ask for more
    num_clients: int = 0  # above 0: a closed loop of so many, whose arrivals are not used

    def start(self, rng: random.Random) -> WorkStream:
        return _SessionStream(self, rng)


class OpenStream:
    """Requests that a clock alone decides."""

    def __init__(self, requests: Iterator[WorkRequest]) -> None:
        self._requests = requests

    def next_request(self) -> WorkRequest | None:
        return next(self._requests, None)

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        return None


class _ClosedStream:
    """Draws each request when it is asked for."""

    def __init__(self, closed: ClosedWork, rng: random.Random) -> None:
        self._closed = closed
        self._rng = rng
        self._next = 0

    def next_request(self) -> WorkRequest | None:
        return self._draw(0.0) if self._next < self._closed.num_clients else None

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        return self._draw(now_s + self._closed.think_s)

    def _draw(self, due_s: float) -> WorkRequest | None:
        work, number = self._closed.work, self._next
        if number >= work.num_requests:
            return None
        self._next += 1
        return work.draw(number, due_s, self._rng)


class _SessionStream:
    """Keeps of each open session how many turns are left and the generator that draws them."""

    def __init__(self, sessions: SessionWork, rng: random.Random) -> None:
        self._work = sessions
        self._rng = rng
        self._begins_s = sessions.arrivals.times_s(random.Random(rng.getrandbits(64)))
        self._next_session = 0
        self._next_number = 0
        self._open: dict[int, tuple[random.Random, int]] = {}  # session -> (its chance, turns left)

    def next_request(self) -> WorkRequest | None:
        num_clients = self._work.num_clients
        if num_clients:
            return self._begin(0.0) if self._next_session < num_clients else None
        return self._begin(next(self._begins_s))

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        if request.session not in self._open:
            return None
        rng, _ = self._open[request.session]
        due_s = now_s + (rng.expovariate(1 / self._work.think_s) if self._work.think_s else 0.0)
        following: WorkRequest | None = None
        if is_whole:
            history = (*request.runs, Run(ANSWER_LABEL, request.num_output_tokens))
            following = self._turn(request.session, due_s, history)
        else:
            del self._open[request.session]
        return self._begin(due_s) if following is None and self._work.num_clients else following

    def _begin(self, due_s: float) -> WorkRequest | None:
        """The next session's first turn; a session whose first message would be too long already is passed over."""
        while self._next_session < self._work.num_sessions:
            session = self._next_session
            self._next_session += 1
            # A generator each, so that no session's draws depend on when another's answers end.
            rng = random.Random(self._rng.getrandbits(64))
            self._open[session] = (rng, self._work.num_turns.draw(rng))
            request = self._turn(session, due_s, self._work.system.draw(rng))
            if request is not None:
                return request
        return None

    def _turn(self, session: int, due_s: float, history: tuple[Run, ...]) -> WorkRequest | None:
        rng, num_left = self._open[session]
        message = self._work.message.draw(rng)
        is_too_long = sum(run.num_tokens for run in history) + message > self._work.max_prompt_tokens
        if num_left < 1 or is_too_long:
            del self._open[session]
            return None
        self._open[session] = (rng, num_left - 1)
        number = self._next_number
        self._next_number += 1
        # Sessions and turns are numbered apart: a label is never used twice, whatever order turns come in.
        label = FIRST_LABEL + self._work.system.num_prefixes + (session << 16) + num_left
        own = Run(label, message)
        return WorkRequest(number, due_s, (*history, own), self._work.output.draw(rng), session=session)
