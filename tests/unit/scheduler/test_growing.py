"""Room is taken as answers grow; when there is none, the youngest stream starts over and no token is lost."""

import pytest
from tests.unit.scheduler.rigs import LAYOUT, PEER, PEER_INCARNATION, VOCAB, Solo, handoff, sequence_id, to_peer

from disagg.core.ids import StepId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import AnswerReservation, EmitTokens, FinishPrefill, RequestReservation
from disagg.scheduler import events
from disagg.scheduler.engine import StepPlan, StepRow, TokenHistory
from disagg.telemetry.metrics import PREEMPTIONS
from disagg.testing.engine import FakeEngine, expected_tokens


def prompt(number: int, length: int = 4) -> tuple[int, ...]:
    """Prompts that share no block."""
    return tuple((17 * number + index) % VOCAB for index in range(length))


def spec(number: int, length: int, max_tokens: int, priority: int = 0) -> SequenceSpec:
    sampling = SamplingParams(max_tokens, temperature=0.0)
    return SequenceSpec(sequence_id(number), prompt(number, length), sampling, priority)


def in_step(solo: Solo) -> list[int]:
    """Numbers of the sequences whose rows are computed now."""
    return [] if solo.plan is None else [row.sequence_id.request_id.number for row in solo.plan.rows]


# --- room at the start, and more later ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headroom", "max_tokens", "num_blocks"), [(0, 30, 1), (1, 30, 2), (4, 30, 2), (5, 30, 3), (64, 30, 9), (64, 2, 2)]
)
def test_an_answer_needs_room_for_its_headroom_only(headroom: int, max_tokens: int, num_blocks: int) -> None:
    solo = Solo(Role.DECODE, answer_headroom=headroom)
    solo.start(0, Task.WHOLE, prompt(0), max_tokens=max_tokens)
    assert solo.state.num_held_blocks == num_blocks


def test_a_reservation_holds_the_same_headroom() -> None:
    solo = Solo(Role.DECODE, answer_headroom=4)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, prompt(0, 10), max_tokens=30)
    solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    assert (solo.state.num_reserved_blocks, solo.state.num_held_blocks) == (3, 1)


def test_a_prefill_worker_holds_the_prompt_alone() -> None:
    solo = Solo(Role.PREFILL, answer_headroom=64)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, prompt(0, 10), max_tokens=30)
    assert solo.state.num_held_blocks == 3


def test_an_answer_takes_a_block_whenever_it_needs_one() -> None:
    solo, engine = Solo(Role.DECODE, num_blocks=8, answer_headroom=1), FakeEngine(LAYOUT, 8, VOCAB)
    solo.start_spec(spec(0, 4, max_tokens=29), Task.WHOLE)  # 32 tokens of KV in the end: all there is
    held = []
    while solo.plan is not None:
        held.append(solo.state.num_held_blocks)
        solo.compute_step(engine)
    assert held == [max(2, -(-(4 + written) // 4)) for written in range(29)]
    assert [token.token_id for token in solo.tokens(0)] == expected_tokens(
        LAYOUT, sequence_id(0), prompt(0), SamplingParams(29, temperature=0.0), VOCAB
    )
    assert solo.scheduler.counters.get(PREEMPTIONS) == 0


def test_an_admission_leaves_a_block_for_each_running_stream() -> None:
    solo = Solo(Role.DECODE, num_blocks=6, answer_headroom=4)
    for number in range(2):
        solo.start(number, Task.WHOLE, prompt(number), max_tokens=5)  # 2 blocks each, in the end too
    for _ in range(2):
        solo.finish_step()
    solo.start(2, Task.WHOLE, prompt(2), max_tokens=1)  # 1 block; 2 are free
    for _ in range(3):
        assert solo.state.num_waiting == 1
        assert in_step(solo) == [0, 1]
        solo.finish_step()
    assert in_step(solo) == [1, 2]


# --- preemption --------------------------------------------------------------------------------------------------


class Crowd:
    """Streams in a pool too small for all their answers, with a real (fake) engine: its tokens tell every lost byte."""

    def __init__(self, num_blocks: int, *specs: SequenceSpec, headroom: int = 1) -> None:
        budget = StepBudget(chunk_tokens=16, mixed_chunk_tokens=8, max_running=16)
        self.solo = Solo(Role.DECODE, num_blocks=num_blocks, budget=budget, answer_headroom=headroom)
        self.engine = FakeEngine(LAYOUT, num_blocks, VOCAB)
        self.specs = specs
        for each in specs:
            self.solo.start_spec(each, Task.WHOLE)

    @property
    def num_preemptions(self) -> int:
        return int(self.solo.scheduler.counters.get(PREEMPTIONS))

    def step(self) -> None:
        self.solo.compute_step(self.engine)

    def until_preempted(self) -> None:
        before = self.num_preemptions
        for _ in range(200):
            if self.num_preemptions > before:
                return
            self.step()
        raise AssertionError("200 steps and nobody was preempted")

    def finish(self) -> None:
        for _ in range(1000):
            if self.solo.plan is None:
                break
            self.step()
        assert self.solo.scheduler.is_idle
        assert self.solo.num_used == 0
        assert not self.solo.failures
        for each in self.specs:
            number = each.sequence_id.request_id.number
            expected = expected_tokens(LAYOUT, each.sequence_id, each.prompt_ids, each.sampling, VOCAB)
            assert [(t.position, t.token_id) for t in self.solo.tokens(number)] == [*enumerate(expected)]

    def order_of_ends(self) -> list[int]:
        lengths = {each.sequence_id: each.sampling.max_tokens for each in self.specs}
        told = [token for message in self.solo.reports if isinstance(message, EmitTokens) for token in message.tokens]
        ends = [token.sequence_id for token in told if token.position + 1 == lengths[token.sequence_id]]
        return [each.request_id.number for each in ends]


def test_the_youngest_stream_goes_and_the_others_do_not_notice() -> None:
    crowd = Crowd(8, *(spec(number, 4, 20) for number in range(3)))
    crowd.until_preempted()
    assert in_step(crowd.solo) == [0, 1]
    assert (crowd.num_preemptions, crowd.solo.state.num_waiting) == (1, 1)
    crowd.finish()
    assert crowd.order_of_ends() == [0, 1, 2]


def test_the_youngest_goes_whoever_needs_the_block() -> None:
    """All three fill the pool; the oldest comes to the end of its blocks first."""
    crowd = Crowd(6, spec(0, 7, 12), spec(1, 4, 9), spec(2, 4, 9))
    crowd.until_preempted()
    assert in_step(crowd.solo) == [0, 1]
    crowd.finish()


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 11])
@pytest.mark.parametrize("headroom", [0, 1, 6])
def test_no_token_is_lost_or_another_however_often_it_starts_over(num_blocks: int, headroom: int) -> None:
    specs = [spec(number, 3 + 2 * number, 21 - 3 * number) for number in range(5)]
    crowd = Crowd(num_blocks, *specs, headroom=headroom)
    crowd.finish()
    assert crowd.num_preemptions > 0 or headroom == 6


def test_who_was_preempted_resumes_before_anybody_who_came_later() -> None:
    crowd = Crowd(8, *(spec(number, 4, 20) for number in range(3)))
    crowd.until_preempted()
    num_plans = len(crowd.solo.plans)
    late = spec(3, 4, 4)  # would fit where the other does not
    crowd.specs = (*crowd.specs, late)
    crowd.solo.start_spec(late, Task.WHOLE)
    crowd.finish()
    rows = [[row.sequence_id.request_id.number for row in plan.rows] for plan in crowd.solo.plans[num_plans:]]
    first = {number: [number in step for step in rows].index(True) for number in (2, 3)}
    assert 0 < first[2] <= first[3]


def test_it_reads_again_all_that_it_had_written() -> None:
    crowd = Crowd(8, *(spec(number, 4, 20) for number in range(3)))
    crowd.until_preempted()
    known = [token.token_id for token in crowd.solo.tokens(2)]
    crowd.finish()
    resumed = [row for plan in crowd.solo.plans for row in plan.rows if row.sequence_id == sequence_id(2)]
    readings = [row for row in resumed if row.output_position == len(known)]
    read = [token for row in readings for token in row.token_ids]
    everything = [*prompt(2), *known]
    assert read == everything[len(everything) - len(read) :]
    assert readings[0].position == len(everything) - len(read)  # the rest was found in the prefix index
    assert readings[-1].sampling is not None


def test_a_lower_priority_goes_first_even_when_it_is_older() -> None:
    crowd = Crowd(8, spec(0, 4, 20), spec(1, 4, 20, priority=5), spec(2, 4, 20, priority=5))
    crowd.until_preempted()
    assert in_step(crowd.solo) == [1, 2]
    crowd.finish()
    assert crowd.order_of_ends() == [1, 2, 0]


def test_the_youngest_gives_way_itself_when_it_is_the_one_that_grows() -> None:
    crowd = Crowd(5, spec(0, 4, 9), spec(1, 7, 9), headroom=1)
    crowd.until_preempted()
    assert in_step(crowd.solo) == [0]
    crowd.finish()


def test_a_preempted_sequence_can_be_aborted() -> None:
    crowd = Crowd(8, *(spec(number, 4, 20) for number in range(3)))
    crowd.until_preempted()
    assert crowd.solo.abort(2) == []
    assert crowd.solo.state.num_waiting == 0
    crowd.specs = crowd.specs[:2]
    crowd.finish()


def test_a_preempted_receiver_reads_for_itself_and_needs_its_peer_no_more() -> None:
    solo, engine = Solo(Role.DECODE, num_blocks=5, answer_headroom=1), FakeEngine(LAYOUT, 5, VOCAB)
    solo.meet(Role.PREFILL)
    solo.start_spec(spec(0, 4, 12), Task.WHOLE)
    solo.start_spec(spec(1, 6, 8), Task.DECODE)
    (answer,) = to_peer(AnswerReservation, solo.hear(RequestReservation(handoff(1), solo.fence(), 6)))
    expected = expected_tokens(LAYOUT, sequence_id(1), prompt(1, 6), SamplingParams(8, temperature=0.0), VOCAB)
    write_kv(engine, answer, 6)
    solo.handle(events.WriteLanded(handoff(1), Span(0, 6, 0, 3), None))
    solo.hear(FinishPrefill(handoff(1), solo.fence(), EmittedToken(sequence_id(1), 0, expected[0])))
    solo.handle(events.GrantFenced(handoff(1)))
    while not solo.scheduler.counters.get(PREEMPTIONS):
        solo.compute_step(engine)
    assert in_step(solo) == [0]
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
    while solo.plan is not None:
        solo.compute_step(engine)
    assert not solo.failures
    assert [(token.position, token.token_id) for token in solo.tokens(1)] == [*enumerate(expected)]
    assert solo.scheduler.is_idle


def write_kv(engine: FakeEngine, answer: AnswerReservation, num_tokens: int) -> None:
    """What a prefill worker would have written into the granted blocks."""
    row = StepRow(sequence_id(1), prompt(1, num_tokens), 0, answer.blocks, None)
    engine.run_step(StepPlan(StepId(0), (row,)), lambda num_layers: None)


def test_a_stream_alone_waits_for_hand_offs_instead_of_starting_over() -> None:
    solo = Solo(Role.DECODE, num_blocks=4, answer_headroom=1)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.WHOLE, prompt(0), max_tokens=9)  # 2 blocks, 3 in the end
    solo.start(1, Task.DECODE, prompt(1), max_tokens=1)
    solo.start(2, Task.DECODE, prompt(2), max_tokens=1)
    for number in (1, 2):
        (answer,) = to_peer(AnswerReservation, solo.hear(RequestReservation(handoff(number), solo.fence(), 4)))
        assert answer.failure is None
    for _ in range(5):
        solo.finish_step()
    assert solo.plan is None  # its ninth token of KV has no room
    assert solo.scheduler.counters.get(PREEMPTIONS) == 0
    solo.abort(1)
    assert solo.plan is None  # the fence does not hold yet
    solo.handle(events.GrantFenced(handoff(1)))
    assert in_step(solo) == [0]
    solo.finish_steps()
    assert len(solo.tokens(0)) == 9


@pytest.mark.parametrize("sampling", [SamplingParams(4), SamplingParams(4, top_k=3, logit_bias=((1, 2.0),))])
def test_nobody_without_a_penalty_pays_for_a_history(sampling: SamplingParams) -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(SequenceSpec(sequence_id(0), prompt(0), sampling), Task.WHOLE)
    solo.finish_steps()
    assert [row.history is not None for plan in solo.plans for row in plan.rows] == [False] * 4


def test_a_penalty_gets_all_tokens_before_the_one_that_is_sampled() -> None:
    """Also after chunks, which sample nothing, and with tokens that an earlier attempt had sent."""
    solo = Solo(Role.DECODE, budget=StepBudget(chunk_tokens=4, mixed_chunk_tokens=4, max_running=4))
    sampling = SamplingParams(5, presence_penalty=0.5)
    spec = SequenceSpec(sequence_id(0), prompt(0, 6), sampling)
    solo.start_spec(spec, Task.WHOLE, attempt=3, emitted=(8, 9))
    for token_id in (0, 21, 22, 23):  # the first step is a chunk
        solo.finish_step(token_id)
    histories = [row.history for plan in solo.plans for row in plan.rows]
    answers = [(8, 9), (8, 9, 21), (8, 9, 21, 22)]
    assert histories == [None, *(TokenHistory(3, prompt(0, 6), answer) for answer in answers)]
