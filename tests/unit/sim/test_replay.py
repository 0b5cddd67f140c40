"""A live router and the simulator decide the same, in the same order: a live run is recorded here and replayed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.faults.loopback import MODEL, live_worker, paired
from tests.unit.worker.rigs import until

from disagg.core.errors import ConfigurationError, DisaggError
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import Incarnation
from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.stream import GenerateRequest, RequestFailed, TokenStream
from disagg.router.decision_file import DecisionFile
from disagg.router.service import LiveService
from disagg.sim.replay import replay
from disagg.telemetry.decision_log import Decision, DecisionKind, DecisionLog, LogLine


@contextlib.asynccontextmanager
async def recorded_router(path: Path) -> AsyncIterator[tuple[LiveService, str]]:
    """A router without its HTTP side, whose decisions are written down."""
    config = DispatcherConfig(Incarnation(5), {MODEL: "tok"}, local_prefill_tokens=12, max_open_requests=12)
    file = DecisionFile(str(path))
    log = DecisionLog(file.write, config)
    made = LiveService(Dispatcher(config, log.decided), beat_interval_s=2.5, decision_log=log)
    address = await made.listen("127.0.0.1", 0)
    try:
        yield made, address
    finally:
        await made.close()
        file.close()


def asked(number: int) -> GenerateRequest:
    prompt = tuple((31 * number + 7 * index) % 900 for index in range(6 + 9 * (number % 4)))
    grammar = GrammarSpec(GrammarKind.LARK, "mod 7") if number % 3 == 0 else None
    return GenerateRequest(MODEL, prompt, SamplingParams(4 + number % 5, 0.7, seed=number, grammar=grammar))


async def read(stream: TokenStream) -> bool:
    """Whether the answer came whole."""
    async with asyncio.timeout(30):
        return not any([isinstance(event, RequestFailed) async for event in stream.events()])


async def live_run(path: Path) -> None:
    """Two and two workers over sockets; one of those that write goes away in the middle, and too much is asked."""
    async with recorded_router(path) as (served, address), contextlib.AsyncExitStack() as workers:
        for name in ("p0", "p1"):
            await workers.enter_async_context(live_worker(name, Role.PREFILL, address))
        await workers.enter_async_context(live_worker("d0", Role.DECODE, address))
        async with live_worker("d1", Role.DECODE, address):
            await paired(served, 4)
            streams = [served.submit(asked(number)) for number in range(12)]
            with pytest.raises(DisaggError):
                served.submit(asked(99))
        await until(lambda: len(served.dispatcher.registry.records()) == 3)
        reads = await asyncio.gather(*(read(stream) for stream in streams))
        assert all(reads)
        later = [served.submit(asked(number)) for number in range(12, 18)]
        later[0].abort()
        assert all(await asyncio.gather(*(read(stream) for stream in later[1:])))


async def test_the_simulator_decides_as_the_live_router_did(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    await live_run(path)
    with path.open("rb") as lines:
        again = replay(lines)
    assert again.first_difference is None
    assert again.logged == again.decided
    counts = {kind: sum(decision.kind is kind for decision in again.logged) for kind in DecisionKind}
    assert counts[DecisionKind.ADMISSION] == 19
    assert counts[DecisionKind.PLACEMENT] >= 18
    assert counts[DecisionKind.RECOVERY] >= 1
    outcomes = {decision.outcome for decision in again.logged}
    assert {"local", "remote", "Overloaded", "move"} <= outcomes


async def test_another_policy_is_found_out(tmp_path: Path) -> None:
    """The comparison can fail: with other settings the same events lead to other decisions."""
    path = tmp_path / "decisions.jsonl"
    await live_run(path)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    changed = first.replace(b'"local_prefill_tokens":12', b'"local_prefill_tokens":0')
    assert changed != first
    again = replay([changed, *rest])
    assert again.first_difference is not None
    logged, decided = again.logged[again.first_difference], again.decided[again.first_difference]
    assert (logged.outcome, decided.outcome) == ("local", "remote")


def line(**fields: object) -> bytes:
    return msgspec.json.encode(LogLine(**fields)) + b"\n"  # type: ignore[arg-type]


def test_a_log_cut_off_in_a_line_is_read_up_to_there() -> None:
    config = msgspec.Raw(msgspec.json.encode(DispatcherConfig(Incarnation(1), {"m": "t"})))
    ticked = line(now_s=1.0, kind="TimePassed", happened=msgspec.Raw(b"{}"))
    assert replay([line(config=config), ticked, ticked[:10]]).num_events == 1


def test_what_is_no_decision_log_is_refused() -> None:
    config = msgspec.Raw(msgspec.json.encode(DispatcherConfig(Incarnation(1), {"m": "t"})))
    with pytest.raises(ConfigurationError, match="line 1 is none of a decision log"):
        replay([b"hello\n"])
    with pytest.raises(ConfigurationError, match="no DispatcherConfig of this version"):
        replay([line(config=msgspec.Raw(b"[1]"))])
    with pytest.raises(ConfigurationError, match="'Surprise' is no event"):
        replay([line(config=config), line(kind="Surprise", happened=msgspec.Raw(b"{}"))])


def test_a_decision_that_is_missing_is_a_difference() -> None:
    config = msgspec.Raw(msgspec.json.encode(DispatcherConfig(Incarnation(1), {"m": "t"})))
    decided = line(now_s=1.0, decided=Decision(DecisionKind.ADMISSION, "0", "accepted"))
    assert replay([line(config=config), decided]).first_difference == 0


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="choose another --decision-log"):
        DecisionFile(str(tmp_path / "gone" / "log"))


def test_a_full_disk_ends_the_log_only() -> None:
    file = DecisionFile("/dev/full")
    for _ in range(3):
        file.write(b"x" * 100_000)
    file.close()
