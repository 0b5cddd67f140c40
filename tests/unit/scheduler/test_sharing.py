"""Which KV is found again, by whom, and how it is counted."""

import msgspec
import pytest
from tests.unit.scheduler.rigs import (
    LAYOUT,
    VOCAB,
    Duo,
    Solo,
    duo,
    handoff,
    of,
    sequence_id,
)

from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.protocol.messages import RequestReservation, TakeHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import PushSpan
from disagg.telemetry.metrics import PREFIX_TOKENS_HIT, PREFIX_TOKENS_LOOKED_UP
from disagg.testing.engine import FakeEngine, expected_tokens

PROMPT = tuple(range(10))


def spec(number: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 3, **fields: str) -> SequenceSpec:
    sampling = SamplingParams(max_tokens, temperature=0.0)
    return msgspec.structs.replace(SequenceSpec(sequence_id(number), prompt, sampling), **fields)


def looked_up(solo: Solo, task: Task) -> tuple[float, float]:
    """(tokens asked of the index, tokens found)."""
    counters = solo.scheduler.counters
    return counters.get(PREFIX_TOKENS_LOOKED_UP, task.value), counters.get(PREFIX_TOKENS_HIT, task.value)


# --- salts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("salt", "position"), [("", 8), ("mine", 0)])
def test_kv_is_shared_within_a_salt_only(salt: str, position: int) -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(0), Task.WHOLE)
    solo.finish_steps()
    solo.start_spec(spec(1, cache_salt=salt), Task.WHOLE)
    assert solo.plan is not None
    assert solo.plan.rows[0].position == position
    solo.finish_steps()
    solo.start_spec(spec(2, cache_salt=salt), Task.WHOLE)
    assert solo.plan.rows[0].position == 8


def test_a_salted_prompt_is_handed_over_and_found_at_both_ends() -> None:
    pair = duo()
    for number in range(2):
        start(pair, spec(number, cache_salt="mine"))
        while pair.source.plan is not None:
            pair.step(pair.source)
        while pair.destination.plan is not None:
            pair.step(pair.destination)
    assert looked_up(pair.source, Task.PREFILL) == (20, 8)
    assert looked_up(pair.destination, Task.DECODE) == (20, 8)
    start(pair, spec(2, cache_salt="yours"))
    assert looked_up(pair.source, Task.PREFILL) == (30, 8)


def start(pair: Duo, each: SequenceSpec) -> None:
    """Both parts of a sequence, decode first, with a spec of one's own."""
    pair.start_spec(each, (Task.PREFILL, Task.DECODE))
    pair.exchange()


# --- counting ----------------------------------------------------------------------------------------------------


def test_tokens_asked_and_found_are_counted_once_a_sequence() -> None:
    solo = Solo(Role.DECODE)
    for number in range(3):
        solo.start_spec(spec(number), Task.WHOLE)
        solo.finish_steps()
    assert looked_up(solo, Task.WHOLE) == (30, 16)


def test_a_refused_reservation_counts_nothing() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.WHOLE, tuple(range(50, 62)), max_tokens=3)
    solo.start(1, Task.DECODE, PROMPT)
    solo.hear(RequestReservation(handoff(1), solo.fence(), 10))
    assert looked_up(solo, Task.DECODE) == (0, 0)


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [4, 7, 8])
def test_the_next_turn_of_a_chat_finds_the_answer(num_tokens: int) -> None:
    """On the worker that received the prompt and wrote the answer."""
    pair = duo()
    pair.start(0, (Task.PREFILL, Task.DECODE), PROMPT, max_tokens=num_tokens)
    pair.exchange()
    pair.step(pair.source)
    while pair.destination.plan is not None:
        pair.step(pair.destination)
    assert pair.destination.scheduler.is_idle
    known = PROMPT + (7,) * num_tokens
    pair.destination.start(1, Task.WHOLE, (*known, 1, 2, 3), max_tokens=1)
    assert pair.destination.plan is not None
    assert pair.destination.plan.rows[0].position == (len(known) - 1) // 4 * 4  # the last token's KV is never computed


# --- the same at the same time -----------------------------------------------------------------------------------


def test_two_equal_prompts_at_once_end_up_with_one_copy() -> None:
    solo, engine = Solo(Role.DECODE, num_blocks=16, answer_headroom=0), FakeEngine(LAYOUT, 16, VOCAB)
    for number in range(2):
        solo.start_spec(spec(number, max_tokens=6), Task.WHOLE)
    assert solo.state.num_held_blocks == 6
    for _ in range(2):  # the second came while the first was computed
        solo.compute_step(engine)
    assert solo.state.num_held_blocks == 4  # two full blocks together, an open one each
    assert solo.plan is not None
    tables = [row.block_table for row in solo.plan.rows]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    while solo.plan is not None:
        solo.compute_step(engine)
    for number in range(2):
        expected = expected_tokens(LAYOUT, sequence_id(number), PROMPT, spec(0, max_tokens=6).sampling, VOCAB)
        assert [token.token_id for token in solo.tokens(number)] == expected
    assert solo.state.num_cached_blocks == 3


def test_what_follows_an_equal_beginning_is_found_again_too() -> None:
    """The second's own blocks lie behind the shared ones in the index."""
    solo = Solo(Role.DECODE, num_blocks=16, answer_headroom=0)
    solo.start_spec(spec(0, PROMPT[:8], max_tokens=1), Task.WHOLE)
    solo.start_spec(spec(1, (*PROMPT[:8], 50, 51, 52, 53), max_tokens=1), Task.WHOLE)
    solo.finish_steps()
    solo.start_spec(spec(2, (*PROMPT[:8], 50, 51, 52, 53, 54), max_tokens=1), Task.WHOLE)
    assert solo.plan is not None
    assert solo.plan.rows[0].position == 12


def test_blocks_that_a_write_may_read_stay_until_the_hand_off_is_over() -> None:
    solo = Solo(Role.PREFILL, num_blocks=16)
    solo.meet(Role.DECODE)
    for number in range(2):
        solo.start_spec(spec(number, PROMPT[:8] + (50 + number,) * 4), Task.PREFILL)
        solo.hear(solo.answer(number))
    pushes = [push for _ in range(2) for push in of(PushSpan, solo.finish_step())]
    assert len({push.source_blocks for push in pushes}) == 2
    assert solo.state.num_held_blocks == 6
    for push in pushes:
        solo.handle(events.WriteFinished(push.handoff_id, push.number, None))
        solo.hear(TakeHandoff(push.handoff_id, solo.fence()))
    assert solo.scheduler.is_idle
    assert solo.state.num_cached_blocks == 4  # two together, and each one's last
