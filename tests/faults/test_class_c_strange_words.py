"""Class C, C1 beyond one scheduler: late, second and unknown words at the router and over real connections."""

import random
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from tests.faults.words import (
    FROM_PEER,
    NOBODY,
    STRANGE,
    peer_messages,
)
from tests.unit.dispatch.rigs import Desk, events_of
from tests.unit.scheduler.rigs import (
    sequence_id,
)
from tests.unit.worker.rigs import DEADLINE_S, Site, gone, layout, meet, site, until

from disagg.channel.channel import Channel, dial
from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Role, Task
from disagg.dispatch.events import ClientGone
from disagg.protocol.messages import (
    AnswerPairing,
    AnswerReservation,
    CancelHandoff,
    EmitTokens,
    FinishPrefill,
    PromptReport,
    ReportFailure,
    RequestPairing,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens

# --- C1: at the router -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["finished", "client gone", "failed"])
@pytest.mark.parametrize("seed", range(20))
def test_c1_words_about_a_request_that_is_over_reach_no_client_and_no_other_request(end: str, seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk().with_pair()
    over, _ = desk.submit(max_tokens=3)
    other, _ = desk.submit(max_tokens=3)
    desk.read("p0", over)
    desk.emit("p0", over, 0)
    if end == "finished":
        desk.emit("d0", over, 1)
        desk.emit("d0", over, 2)
    elif end == "client gone":
        desk.handle(ClientGone(over))
    else:
        desk.hear("d0", ReportFailure(SequenceId(over, 0), 1, Failure(FailureKind.INVALID_REQUEST, "scripted")))
    assert desk.dispatcher.open_request(over) is None
    claims = desk.claims()
    late = list(_words(over)) + list(_words(RequestId(Incarnation(404), 1)))
    late += [each for choice in (7, -1) for each in _words(other, choice)]
    late *= 2
    rng.shuffle(late)
    for name, message in late:
        incarnation = rng.choice([1, 1, 2])
        before = _ignored(desk)
        assert events_of(desk.hear(name, message, incarnation)) == []
        is_counted = isinstance(message, ReportFailure) or bool(message.tokens) or incarnation == 2
        assert _ignored(desk) - before == is_counted
    assert desk.claims() == claims
    assert [len(events_of(desk.emit("d0", other, position))) for position in range(3)] == [1, 1, 1]
    assert desk.dispatcher.num_open == 0


def _words(request_id: RequestId, choice: int = 0) -> Iterator[tuple[str, EmitTokens | ReportFailure]]:
    """Everything that both workers can say of one choice."""
    which = SequenceId(request_id, choice)
    for name in ("p0", "d0"):
        for position in range(3):
            yield name, EmitTokens((EmittedToken(which, position, 9),))
        yield name, EmitTokens((), (PromptReport(HandoffId(which, 1), 0, 10),))
        for kind in FailureKind:
            yield name, ReportFailure(which, 1, Failure(kind, "scripted"))


def _ignored(desk: Desk) -> float:
    counters = desk.dispatcher.counters
    return sum(total for name, _, total in counters.items() if name == table.MESSAGES_IGNORED.name)


# --- C1: over real connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["a raw payload", "the end"])
async def test_c1_a_peer_that_says_everything_wrong_disturbs_no_answer_of_others(last: str) -> None:
    """Well paired, it names nobody and other workers' hand-offs; at last it sends bytes that are no message."""
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    async with site("p", Role.PREFILL) as prefill, site("d", Role.DECODE) as decode:
        await meet(prefill, decode)
        channels = [await _pair_by_hand(target) for target in (prefill, decode)]
        prompts = {number: tuple((31 * number + index) % 900 for index in range(40)) for number in range(4)}
        for number, prompt in prompts.items():
            decode.start(number, Task.DECODE, prefill, prompt, sampling)
            prefill.start(number, Task.PREFILL, decode, prompt, sampling)
        real = Fence(prefill.peers.card.incarnation, decode.peers.card.incarnation, 1)
        for channel in channels:
            for number in (*prompts, NOBODY):
                for fence in (real, STRANGE):
                    for message in peer_messages(number, fence).values():
                        channel.send(message)
        if last == "a raw payload":
            for channel in channels:
                channel.send({"not": "a message"})
                await gone(channel)
        await decode.until(lambda: all(decode.has_answered(number) for number in prompts) or bool(decode.failures))
        assert decode.failures == prefill.failures == []
        for number, prompt in prompts.items():
            tokens = [token.token_id for token in decode.tokens(number)]
            assert tokens == expected_tokens(layout(), sequence_id(number), prompt, sampling)
        for channel in channels:
            await channel.close()
        for each in (prefill, decode):
            await each.settled()
            await until(partial(has_ignored, each))


def has_ignored(target: Site) -> bool:
    counters = target.worker.scheduler.counters
    kinds = (TakeHandoff, CancelHandoff, FinishPrefill, AnswerReservation)
    return all(counters.get(table.MESSAGES_IGNORED, kind.__name__) for kind in kinds)


async def _pair_by_hand(target: Site) -> Channel[WorkerToWorker]:
    channel = await dial(target.peers.card.control_address, FROM_PEER, timeout_s=DEADLINE_S)
    mine = msgspec.structs.replace(target.peers.card, worker_id=WorkerId("by-hand"), incarnation=Incarnation(9))
    channel.send(RequestPairing(mine))
    answer = await channel.receive(DEADLINE_S)
    assert isinstance(answer, AnswerPairing)
    assert answer.failure is None
    return channel
