"""Class E, bytes: any two block sizes (E5), no push before its KV is written (E6), nothing guessed (E7)."""

import random
from typing import Any

import msgspec
import pytest
from tests.faults.outputs import GREEDY, check_answers, counted, prompt_kv, reserved
from tests.faults.words import FROM_PEER
from tests.unit.scheduler.rigs import Solo, of, to_peer
from tests.unit.worker.rigs import DEADLINE_S, Site, meet, sequence_id, site
from tests.unit.worker.rigs import layout as small_layout

from disagg.channel.channel import dial
from disagg.core.errors import FailureKind
from disagg.core.ids import Incarnation, RequestId, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import Span
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import WorkerCard
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AnswerPairing,
    RequestPairing,
    RequestReservation,
)
from disagg.scheduler.actions import Action, PushSpan
from disagg.scheduler.engine import OnLayers, StepPlan, StepResult
from disagg.telemetry import metrics as table
from disagg.testing.engine import FakeEngine, expected_tokens
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_worker import VirtualWorker

# --- E5, E7 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(HandoffMode))
@pytest.mark.parametrize("decode_block", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("prefill_block", [1, 2, 3, 4, 16])
def test_e5_kv_is_bit_equal_after_a_hand_off_between_any_two_block_sizes(
    prefill_block: int, decode_block: int, mode: HandoffMode
) -> None:
    """Lengths around chunks and blocks; the second half of them finds a prefix at one end, the other or both."""
    cluster = VirtualCluster(5)
    prefill = cluster.start_worker("prefill-0", Role.PREFILL, block_size=prefill_block, num_blocks=300, mode=mode)
    decode = cluster.start_worker("decode-0", Role.DECODE, block_size=decode_block, num_blocks=300)
    cluster.time.run(until=lambda: cluster.is_ready)
    lengths = (1, 2, 15, 16, 17, 33, 16, 35, 47)
    for length in lengths:
        prompt = tuple(range(length))
        request_id = cluster.submit(GenerateRequest(MODEL, prompt, GREEDY))
        cluster.time.run(until=lambda now=request_id: _is_decoding(decode, now))  # type: ignore[misc]
        (sequence,) = decode.scheduler._state.sequences.values()
        layout = decode.card.layout
        found = decode.engine.read(sequence.blocks, Span(0, length, 0, layout.num_layers))
        assert found == prompt_kv(layout, prompt)
        cluster.time.run(until=lambda: cluster.are_all_over)
    check_answers(cluster)
    received = counted(decode, table.PROMPT_TOKENS_RECEIVED)
    assert received >= max(lengths), "nothing was transferred: equal is no news"
    sent = counted(prefill, table.HANDOFF_BYTES)
    assert sent == received * prefill.card.layout.span_bytes(Span(0, 1, 0, 3))
    assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0
    assert counted(decode, table.HANDOFFS, "received") == len(lengths)


def _is_decoding(decode: VirtualWorker, request_id: RequestId) -> bool:
    sequences = decode.scheduler._state.sequences.values()
    return any(s.state is SequenceState.DECODING and s.sequence_id.request_id == request_id for s in sequences)


UNLIKE: dict[str, Any] = {
    "num_layers": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": "float16",
    "is_latent": True,
}


async def answer_to(target: Site, **changes: Any) -> AnswerPairing:
    """What a worker says to a peer whose KV is laid out like that."""
    channel = await dial(target.peers.card.control_address, FROM_PEER, timeout_s=DEADLINE_S)
    layout = msgspec.structs.replace(target.peers.card.layout, **changes)
    channel.send(RequestPairing(_card(target, layout=layout)))
    answer = await channel.receive(DEADLINE_S)
    await channel.close()
    assert isinstance(answer, AnswerPairing)
    return answer


def _card(target: Site, **changes: Any) -> WorkerCard:
    mine = msgspec.structs.replace(target.peers.card, worker_id=WorkerId("by-hand"), incarnation=Incarnation(9))
    return msgspec.structs.replace(mine, **changes)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_e5_an_unlike_layout_is_refused_at_pairing_by_either_side_with_both_values(role: Role) -> None:
    """So there is no first request that could show it."""
    async with site("own", role) as target:
        for field, value in UNLIKE.items():
            answer = await answer_to(target, **{field: value})
            assert answer.failure is not None, field
            assert answer.failure.kind is FailureKind.INVALID_REQUEST
            for text in (str(value), str(getattr(target.peers.card.layout, field)), "own", "by-hand"):
                assert text in answer.failure.message
        # Dialled by the worker itself, it is no other.
        for field, value in UNLIKE.items():
            layout = msgspec.structs.replace(target.peers.card.layout, **{field: value})
            target.peers.announce((_card(target, layout=layout, worker_id=WorkerId(f"peer-{field}")),))
            await target.until(lambda: len(target.pairings) > 0)
            (failure,) = target.pairings
            assert failure is not None
            assert str(value) in failure.message
            target.told.clear()
        assert counted(target, table.PAIRINGS_REFUSED) == 2 * len(UNLIKE)


@pytest.mark.parametrize("changes", [{"dtype": "fp8_fused"}, {"order": "a later release's"}, {"num_layers": 0}])
async def test_e7_a_layout_that_nobody_here_knows_is_refused_and_not_guessed(changes: dict[str, Any]) -> None:
    async with site("own", Role.DECODE) as target:
        answer = await answer_to(target, **changes)
        assert answer.failure is not None
        assert str(next(iter(changes.values()))) in answer.failure.message
        assert (await answer_to(target)).failure is None


@pytest.mark.parametrize("block_size", [4, 16])
async def test_e7_equal_answers_come_from_bytes_that_were_really_moved(block_size: int) -> None:
    """Over TCP: all of the prompt was sent, nothing was computed where it is decoded, and the bytes lie there."""
    prompt = tuple(range(100))
    kv = small_layout(block_size)
    async with site("p", Role.PREFILL) as prefill, site("d", Role.DECODE, kv=kv) as decode:
        await meet(prefill, decode)
        decode.start(0, Task.DECODE, prefill, prompt, GREEDY)
        prefill.start(0, Task.PREFILL, decode, prompt, GREEDY)
        blocks = await reserved(decode, 0)
        await decode.until(lambda: decode.has_answered(0))
        await prefill.settled()
        assert [token.token_id for token in decode.tokens(0)] == expected_tokens(kv, sequence_id(0), prompt, GREEDY)
        assert decode.engine.read(blocks, Span(0, 100, 0, kv.num_layers)) == prompt_kv(kv, prompt)
        assert counted(prefill, table.HANDOFF_BYTES) == kv.span_bytes(Span(0, 100, 0, kv.num_layers))
        assert counted(prefill, table.PUSHES) >= kv.num_layers
        assert counted(decode, table.PROMPT_TOKENS_RECEIVED) == 100
        assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0


# --- E6 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_e6_no_push_covers_kv_that_is_not_written_yet(seed: int) -> None:
    rng = random.Random(seed)
    chunk = rng.randint(1, 9)
    solo = Solo(
        Role.PREFILL,
        budget=StepBudget(chunk, chunk, 8),
        mode=rng.choice(list(HandoffMode)),
        min_push_bytes=rng.choice([0, 100, 10**6]),
    )
    solo.meet(Role.DECODE)
    written: set[tuple[int, int, int]] = set()  # sequence, layer, token
    pushed: set[tuple[int, int, int]] = set()

    asked: list[int] = []

    def check(actions: list[Action]) -> None:
        asked.extend(each.handoff_id.sequence_id.request_id.number for each in to_peer(RequestReservation, actions))
        for push in of(PushSpan, actions):
            number, span = push.handoff_id.sequence_id.request_id.number, push.span
            cells = {
                (number, layer, token)
                for layer in range(span.layer_start, span.layer_stop)
                for token in range(span.token_start, span.token_stop)
            }
            assert cells <= written, f"{span} of {number} was pushed before it was written"
            pushed.update(cells)

    for number in range(3):
        check(solo.start(number, Task.PREFILL, tuple(range(10 * number, 10 * number + 10))))
    for _ in range(200):
        if asked and (solo.plan is None or rng.random() < 0.3):
            check(solo.hear(solo.answer(asked.pop(0))))
        elif solo.plan is not None:
            rows = solo.plan.rows
            reported = 0
            for layers in range(1, 4):
                for row in rows:
                    number = row.sequence_id.request_id.number
                    written |= {(number, layers - 1, row.position + index) for index in range(len(row.token_ids))}
                if layers < 3 and rng.random() < 0.7 and layers > reported:
                    check(solo.layers(layers))
                    reported = layers
            check(solo.finish_step())
    assert pushed == {(number, layer, token) for number in range(3) for layer in range(3) for token in range(10)}


class LateEngine(FakeEngine):
    """What a step is about to write is rubbish until the very moment in which its layer is reported."""

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        for row in plan.rows:
            span = Span(row.position, row.position + len(row.token_ids), 0, self.layout.num_layers)
            self.write(row.block_table, span, b"\xee" * self.layout.span_bytes(span))
        return super().run_step(plan, on_layers)


async def test_e6_bytes_are_read_after_the_engine_has_written_them_on_tcp() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    prefill = Site("p", Role.PREFILL, small_layout(), 64)
    prefill.engine = LateEngine(small_layout(), 64)
    await prefill.open()
    try:
        async with site("d", Role.DECODE) as decode:
            await meet(prefill, decode)
            prompts = {number: tuple((31 * number + index) % 900 for index in range(45)) for number in range(12)}
            for number, prompt in prompts.items():
                decode.start(number, Task.DECODE, prefill, prompt, sampling)
                prefill.start(number, Task.PREFILL, decode, prompt, sampling)
            await decode.until(lambda: all(decode.has_answered(number) for number in prompts) or bool(decode.failures))
            assert decode.failures == []
            for number, prompt in prompts.items():
                tokens = [token.token_id for token in decode.tokens(number)]
                assert tokens == expected_tokens(small_layout(), sequence_id(number), prompt, sampling)
            await decode.settled()
            await prefill.settled()
    finally:
        await prefill.close()
