"""What a request spends its time on, and the clock with which a worker measures its own part.

Durations are measured by whoever spends them and travel as seconds; clocks of two processes are never compared.
"""

import enum

import msgspec

from disagg.core.errors import InternalFault

MAX_STAGES = 64  # in one report; further ones are added to the last of their kind


class Place(enum.StrEnum):
    """Where time is spent."""

    ROUTER = "router"
    PREFILL = "prefill"  # the worker that reads the prompt
    DECODE = "decode"  # the worker that writes the answer
    NETWORK = "network"


class Stage(enum.StrEnum):
    """Every moment of a request is in one of these."""

    RECEIVE = "receive"  # the request's body comes in
    ROUTER_QUEUE = "router_queue"  # it waits for a text thread, or for a worker that can take it
    TOKENISE = "tokenise"  # its JSON is read, its template rendered, its text turned into tokens
    LOST = "lost"  # on workers that failed or were left before the next token came
    PREFILL_QUEUE = "prefill_queue"  # without blocks, or with them and behind others
    RESERVATION = "reservation"  # until the decode worker has given blocks
    PREFILL = "prefill"  # in a step that reads a chunk of it
    PREFILL_ELSEWHERE = "prefill_elsewhere"  # all of a prefill worker's part, of one that could not say more
    TRANSFER = "transfer"  # the prompt is computed, its KV is not all here: what could not be hidden
    DECODE_QUEUE = "decode_queue"  # ready for the next token, and behind others
    FIRST_STEP = "first_step"  # in the first step that only writes
    NETWORK_PREFILL = "network_router_prefill"  # of the router's round trip what the prefill worker has not spent
    NETWORK_DECODE = "network_router_decode"  # the same of the worker that writes
    UNREPORTED = "unreported"  # a worker that did not say what it spent
    HELD = "held"  # text waits for later tokens: a stop string, a call or a character may begin in it
    WRITE = "write"  # from a token's coming, or from when its text may go out, to its having been written to the client
    STREAM = "stream"  # all tokens after the second


STAGE_PLACES: dict[Stage, Place] = {
    Stage.RECEIVE: Place.ROUTER,
    Stage.ROUTER_QUEUE: Place.ROUTER,
    Stage.TOKENISE: Place.ROUTER,
    Stage.LOST: Place.ROUTER,
    Stage.PREFILL_QUEUE: Place.PREFILL,
    Stage.RESERVATION: Place.PREFILL,
    Stage.PREFILL: Place.PREFILL,
    Stage.PREFILL_ELSEWHERE: Place.PREFILL,
    Stage.TRANSFER: Place.DECODE,
    Stage.DECODE_QUEUE: Place.DECODE,
    Stage.FIRST_STEP: Place.DECODE,
    Stage.NETWORK_PREFILL: Place.NETWORK,
    Stage.NETWORK_DECODE: Place.NETWORK,
    Stage.UNREPORTED: Place.ROUTER,
    Stage.HELD: Place.ROUTER,
    Stage.WRITE: Place.ROUTER,
    Stage.STREAM: Place.DECODE,
}


class StageTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Time in one stage. num_tokens: read in it, of a chunk of a prompt."""

    stage: Stage
    seconds: float
    num_tokens: int = 0


class StageClock:
    """Splits a stretch of one worker's time into stages: each moment belongs to exactly one."""

    __slots__ = ("_num_tokens", "_since_s", "_spent", "_stage")

    def __init__(self, stage: Stage, now_s: float) -> None:
        self._stage = stage
        self._since_s = now_s
        self._num_tokens = 0
        self._spent: list[StageTime] = []

    @property
    def stage(self) -> Stage:
        return self._stage

    def enter(self, stage: Stage, now_s: float, num_tokens: int = 0) -> None:
        """What comes from now on. Entering the stage that it is in already goes on with it, but for a new chunk."""
        if stage is not self._stage or num_tokens:
            self._close(now_s)
            self._stage, self._num_tokens = stage, num_tokens

    def take(self, now_s: float) -> tuple[StageTime, ...]:
        """All since the start or since this was last asked, in order."""
        self._close(now_s)
        spent, self._spent = self._spent, []
        return tuple(spent)

    def _close(self, now_s: float) -> None:
        seconds, num_tokens = now_s - self._since_s, self._num_tokens
        self._since_s, self._num_tokens = now_s, 0
        if seconds <= 0.0 and not num_tokens:
            return
        if len(self._spent) >= MAX_STAGES:
            for index in reversed(range(len(self._spent))):
                known = self._spent[index]
                if known.stage is self._stage:
                    more = StageTime(self._stage, known.seconds + seconds, known.num_tokens + num_tokens)
                    self._spent[index] = more
                    return
        self._spent.append(StageTime(self._stage, seconds, num_tokens))

    def check_invariants(self) -> None:
        """Raises InternalFault for time that goes back, and for more stages than may be kept."""
        if any(spent.seconds < 0.0 for spent in self._spent):
            raise InternalFault(f"time went back: {self._spent}")
        if len(self._spent) > MAX_STAGES + len(Stage):
            raise InternalFault(f"{len(self._spent)} stages are kept, the limit is {MAX_STAGES}")
