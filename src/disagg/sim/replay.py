"""A live router's decision log through the dispatcher once more, in virtual time: the same decisions, in order."""

import contextlib
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from disagg.core.errors import ConfigurationError, DisaggError
from disagg.dispatch import events
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.decided import RequestSubmitted
from disagg.dispatch.dispatcher import Dispatcher
from disagg.telemetry.decision_log import Decision, LogLine, read_decision_log

T = TypeVar("T")

_HAPPENED: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        RequestSubmitted,
        events.WorkerRegistered,
        events.WorkerLost,
        events.WorkerMessageReceived,
        events.ChoiceStopped,
        events.ClientGone,
        events.DrainAsked,
        events.TimePassed,
    )
}


class Replay(msgspec.Struct, frozen=True):
    """logged and decided are equal where live and simulated router agree."""

    num_events: int
    logged: tuple[Decision, ...]
    decided: tuple[Decision, ...]

    @property
    def first_difference(self) -> int | None:
        """Index of the first decision that differs; None when all are the same."""
        for index, (logged, decided) in enumerate(zip(self.logged, self.decided, strict=False)):
            if logged != decided:
                return index
        return None if len(self.logged) == len(self.decided) else min(len(self.logged), len(self.decided))


def replay(lines: Iterable[bytes]) -> Replay:
    """Raises ConfigurationError for what is no decision log, or one of another version."""
    log = read_decision_log(lines)
    dispatcher: Dispatcher | None = None
    logged: list[Decision] = []
    decided: list[Decision] = []
    num_events = 0
    for line in log:
        if dispatcher is None:
            dispatcher = Dispatcher(_decode(line.config, DispatcherConfig), decided.append)
        elif line.decided is not None:
            logged.append(line.decided)
        else:
            num_events += 1
            _take_in(dispatcher, line)
    return Replay(num_events, tuple(logged), tuple(decided))


def _take_in(dispatcher: Dispatcher, line: LogLine) -> None:
    kind = _HAPPENED.get(line.kind)
    if kind is None:
        text = f"{line.kind!r} is no event of this version's router; replay it with the version that wrote it"
        raise ConfigurationError(text)
    event = _decode(line.happened, kind)
    if isinstance(event, RequestSubmitted):
        with contextlib.suppress(DisaggError):  # turned away: a decision like others
            dispatcher.submit(event.request, line.now_s)
    else:
        dispatcher.handle(event, line.now_s)  # type: ignore[arg-type]
    dispatcher.check_invariants()


def _decode(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"no {kind.__name__} of this version: {error}") from None
