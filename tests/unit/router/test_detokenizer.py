"""Tokens to text: never half a character, the same whatever the order of arrival."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.core.request import EmittedToken, FinishReason, TokenLogprobs
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.choice import ChoiceText, TokenEntry
from disagg.router.detokenizer import start_detokenizer
from disagg.router.stop_strings import StopAutomaton

SEQUENCE = SequenceId(RequestId(Incarnation(1), 1), 0)


def emitted(ids: list[int], first: int = 0) -> list[EmittedToken]:
    return [EmittedToken(SEQUENCE, first + place, id_, TokenLogprobs(-1.0)) for place, id_ in enumerate(ids)]


@given(st.lists(st.text("aé你🙂 x\n", max_size=4), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whole_text_without_replacement(tokenizer: ModelTokenizer, words: list[str]) -> None:
    text = "".join(words)
    ids = tokenizer.encode(text)
    detokenizer = start_detokenizer(tokenizer)
    deltas = [detokenizer.push(id_) for id_ in ids]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in deltas)


@given(st.lists(st.integers(0, 421), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ids_give_what_decode_gives(tokenizer: ModelTokenizer, ids: list[int]) -> None:
    detokenizer = start_detokenizer(tokenizer)
    assert "".join([*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]) == tokenizer.decode(ids)


def test_broken_character_shows_only_at_the_end(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("🙃")  # not in the corpus: one token a byte
    assert len(ids) > 1
    detokenizer = start_detokenizer(tokenizer)
    assert [detokenizer.push(id_) for id_ in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_special_and_unknown_ids_add_nothing(tokenizer: ModelTokenizer) -> None:
    detokenizer = start_detokenizer(tokenizer)
    assert [detokenizer.push(id_) for id_ in (0, 1, 2, tokenizer.vocab_size, 10**9)] == [""] * 5


@given(
    st.text("ab🙃 ", max_size=12),
    st.lists(st.text("ab🙃", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_choice_does_not_depend_on_deliveries(
    tokenizer: ModelTokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    ids = [*tokenizer.encode(text), 2]
    automaton = StopAutomaton(stops) if stops else None
    whole, parts = (ChoiceText(0, tokenizer, automaton, (0, 2)) for _ in range(2))
    expected = whole.feed(emitted(ids), FinishReason.STOP)
    assert expected is not None
    shown, place = "", 0
    entries: list[TokenEntry] = []
    for turn in range(len(ids)):
        size = sizes[turn % len(sizes)]
        is_last = place + size >= len(ids)
        piece = parts.feed(emitted(ids[place : place + size], place), FinishReason.STOP if is_last else None)
        parts.check_invariants()
        place += size
        if piece is not None:
            shown += piece.text
            entries += piece.entries
        if is_last:
            break
    assert (shown, parts.finish_reason) == (expected.text, FinishReason.STOP)
    assert [entry.offset for entry in entries] == [entry.offset for entry in expected.entries]
    assert [entry.offset for entry in entries] == [entry.offset for entry in expected.entries]


def test_log_probabilities_wait_for_their_text(tokenizer: ModelTokenizer) -> None:
    choice = ChoiceText(0, tokenizer, StopAutomaton(["b!"]), (2,))
    a, b, bang, x = (tokenizer.encode(text)[0] for text in ("a", "b", "!", "x"))
    first = choice.feed(emitted([a, b]), None)
    assert first is not None
    assert (first.text, [entry.token_id for entry in first.entries]) == ("a", [a])
    second = choice.feed(emitted([x], 2), None)
    assert second is not None
    assert (second.text, [entry.offset for entry in second.entries]) == ("bx", [1, 2])
    last = choice.feed(emitted([b, bang, x], 3), None)
    assert last is not None
    assert (last.text, last.entries, last.finish_reason) == ("", (), FinishReason.STOP)
    assert choice.num_tokens == 5  # what came after the match does not count
    assert choice.feed(emitted([x], 6), None) is None


def test_stop_string_wins_over_length(tokenizer: ModelTokenizer) -> None:
    choice = ChoiceText(0, tokenizer, StopAutomaton(["b"]), ())
    piece = choice.feed(emitted(tokenizer.encode("xb")), FinishReason.LENGTH)
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("x", FinishReason.STOP)


@pytest.mark.parametrize("end_ids", [(2,), ()])
def test_end_tokens_count_but_do_not_show(tokenizer: ModelTokenizer, end_ids: tuple[int, ...]) -> None:
    choice = ChoiceText(0, tokenizer, None, end_ids)
    piece = choice.feed(emitted([2]), FinishReason.STOP)
    assert piece is not None
    assert piece.text == ""
    assert choice.num_tokens == 1
