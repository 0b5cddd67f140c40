"""Which tokens of a choice are new, in order, and before its end."""

import pytest

from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.core.request import EmittedToken, FinishReason, SamplingParams, SequenceSpec
from disagg.protocol.journal import JournalEntry

SEQUENCE = SequenceId(RequestId(Incarnation(1), 2), 0)


def journal(max_tokens: int = 4, stops: tuple[int, ...] = ()) -> JournalEntry:
    return JournalEntry(SequenceSpec(SEQUENCE, (1, 2), SamplingParams(max_tokens, stop_token_ids=stops)))


def token(position: int, token_id: int = 50) -> EmittedToken:
    return EmittedToken(SEQUENCE, position, token_id)


def test_a_repeat_gives_nothing_even_with_another_id() -> None:
    entry = journal()
    assert entry.record(token(0, 50)) == (token(0, 50),)
    assert entry.record(token(0, 51)) == ()
    assert entry.tokens == [token(0, 50)]


def test_an_early_token_waits_for_its_turn() -> None:
    entry = journal()
    assert entry.record(token(2)) == ()
    assert entry.record(token(1)) == ()
    entry.check_invariants()
    assert entry.record(token(0)) == (token(0), token(1), token(2))


def test_of_two_early_tokens_at_one_position_the_first_counts() -> None:
    entry = journal()
    entry.record(token(1, 50))
    entry.record(token(1, 51))
    assert entry.record(token(0))[-1] == token(1, 50)


def test_nothing_comes_after_the_end() -> None:
    entry = journal(stops=(9,))
    entry.record(token(2))
    assert entry.record(token(0)) == (token(0),)
    assert entry.record(token(1, 9)) == (token(1, 9),)
    assert entry.finish is FinishReason.STOP
    assert entry.record(token(2)) == ()
    entry.check_invariants()


def test_the_length_ends_it() -> None:
    entry = journal(max_tokens=1)
    entry.record(token(0))
    assert entry.finish is FinishReason.LENGTH


@pytest.mark.parametrize("position", [-1, 4, 10**9])
def test_positions_outside_the_answer_are_not_kept(position: int) -> None:
    entry = journal(max_tokens=4)
    assert entry.record(token(position)) == ()
    assert entry._early == {}


def test_invariants_notice_a_hole() -> None:
    entry = journal()
    entry.tokens.append(token(1))
    with pytest.raises(InternalFault, match="positions"):
        entry.check_invariants()
