"""Grammars on live workers: over a real hand-off, refused, broken, and one that takes its time while others go on."""

import asyncio
import threading

import pytest
from tests.unit.worker.rigs import DEADLINE_S, layout, meet, sequence_id, site

from disagg.core.errors import FailureKind
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import HandoffId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.protocol.messages import StartSequence
from disagg.scheduler.events import RouterMessageReceived
from disagg.testing.engine import expected_tokens
from disagg.worker.process import prepare_when_idle

PROMPT = (3, 1, 4, 1, 5, 9)


def sampling(text: str = "mod 7") -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=3, grammar=GrammarSpec(GrammarKind.LARK, text))


def alone(number: int, params: SamplingParams) -> RouterMessageReceived:
    return RouterMessageReceived(StartSequence(SequenceSpec(sequence_id(number), PROMPT, params), Task.WHOLE, 1))


async def test_a_grammar_goes_with_its_sequence() -> None:
    async with site("p", Role.PREFILL) as source, site("d", Role.DECODE) as target:
        await meet(source, target)
        target.start(0, Task.DECODE, source, PROMPT, sampling())
        source.start(0, Task.PREFILL, target, PROMPT, sampling())
        await target.until(lambda: bool(target.has_answered(0) or target.failures or source.failures))
        expected = expected_tokens(layout(), sequence_id(0), PROMPT, sampling())
        assert [token.token_id for token in target.tokens(0)] == expected
        await source.settled()
        await target.settled()


@pytest.mark.parametrize("is_broken", [False, True])
async def test_what_the_engine_does_not_take_fails_its_sequence(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site("m", Role.MIXED) as worker:
        if is_broken:
            monkeypatch.setattr(worker.engine, "prepare_grammar", lambda *arguments: 1 / 0)
        worker.worker.handle(alone(0, sampling("nonsense")))
        await worker.until(lambda: bool(worker.failures))
        (report,) = worker.failures
        kind = FailureKind.INTERNAL if is_broken else FailureKind.INVALID_REQUEST
        assert report.failure.kind is kind
        assert ("could not be prepared" if is_broken else "'nonsense' is no grammar") in report.failure.message
        await worker.settled()


async def test_a_grammar_that_takes_its_time_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ready = threading.Event()

    def prepare(attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        assert is_ready.wait(DEADLINE_S)

    async with site("m", Role.MIXED) as worker:
        monkeypatch.setattr(worker.engine, "prepare_grammar", prepare)
        worker.worker.handle(alone(0, sampling()))
        worker.worker.handle(alone(1, SamplingParams(max_tokens=8, seed=3)))
        await worker.until(lambda: len(worker.tokens(1)) == 8)
        assert not worker.tokens(0)
        is_ready.set()
        await worker.until(lambda: len(worker.tokens(0)) == 8)
        assert [t.token_id for t in worker.tokens(0)] == expected_tokens(layout(), sequence_id(0), PROMPT, sampling())
        await worker.settled()


async def test_what_grammars_need_is_prepared_when_the_worker_is_idle() -> None:
    answers, prepared = iter([False, False, True]), asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        preparing = asyncio.create_task(prepare_when_idle(prepared.set, lambda: next(answers), 1e-3))
        await asyncio.sleep(0)
        assert not prepared.is_set()  # not at once
        await preparing
    assert prepared.is_set()
    assert not list(answers)  # asked until it was
