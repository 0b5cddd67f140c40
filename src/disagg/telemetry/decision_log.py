"""A router's decisions and all that they depend on, as JSON lines: what happened (with its time), and what was decided.

  line 1     {"config": ...}                                    how the dispatcher was set up
  others     {"now_s": ..., "kind": ..., "happened": ...}       an event that was taken in
             {"now_s": ..., "decided": {...}}                   what it led to, in order

Whoever feeds the same events into the same code gets the same decisions. Times are on the writer's own clock. The log
holds token ids of prompts and answers: it is for finding out why, not for keeping.
"""

import enum
from collections.abc import Callable, Iterable, Iterator

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.core.ids import WorkerId


class DecisionKind(enum.StrEnum):
    """What was to be decided."""

    ADMISSION = "admission"  # may a request come in
    PLACEMENT = "placement"  # who serves it
    RECOVERY = "recovery"  # what becomes of it after a failure
    WAITING = "waiting"  # nobody can take it: how long to wait
    DRAIN = "drain"  # does an answer stay on a worker that is to end


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision and its reason."""

    kind: DecisionKind
    subject: str  # of which request or sequence
    outcome: str
    reason: str = ""
    workers: tuple[WorkerId, ...] = ()  # decode first
    attempt: int = 0


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: exactly one of config, happened, decided."""

    now_s: float = 0.0
    kind: str = ""  # of what happened
    config: msgspec.Raw = msgspec.Raw()
    happened: msgspec.Raw = msgspec.Raw()
    decided: Decision | None = None


class DecisionLog:
    """Writes lines to whatever takes bytes."""

    def __init__(self, write: Callable[[bytes], object], config: msgspec.Struct) -> None:
        self._write = write
        self._encoder = msgspec.json.Encoder()
        self._now_s = 0.0
        self.num_decisions = 0
        self._put(LogLine(config=msgspec.Raw(self._encoder.encode(config))))

    def happened(self, event: msgspec.Struct, now_s: float) -> None:
        """Before the event is taken in."""
        self._now_s = now_s
        body = msgspec.Raw(self._encoder.encode(event))
        self._put(LogLine(now_s=now_s, kind=type(event).__name__, happened=body))

    def decided(self, decision: Decision) -> None:
        self.num_decisions += 1
        self._put(LogLine(now_s=self._now_s, decided=decision))

    def _put(self, line: LogLine) -> None:
        self._write(self._encoder.encode(line) + b"\n")


def read_decision_log(lines: Iterable[bytes]) -> Iterator[LogLine]:
    """Raises ConfigurationError, with the line's number, for what is no line of a decision log."""
    decoder = msgspec.json.Decoder(LogLine)
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return  # cut off in the middle of a write
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"line {number} is none of a decision log: {error}") from None
