"""Bias, penalties and min_tokens: what they do to scores, and that they depend on token ids alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine import sampling_reference as reference
from tests.unit.engine.steps import sequence_id
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from disagg.core.errors import InternalFault
from disagg.core.request import SamplingParams
from disagg.engine import penalties
from disagg.engine.penalties import Edit, Tally, TallyTable, edit, is_edited
from disagg.engine.sampler import SampleRequest, sample
from disagg.scheduler.engine import TokenHistory

VOCAB = 50
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30).map(tuple)


def scores_of(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def history(prompt: tuple[int, ...], answer: tuple[int, ...], attempt: int = 1) -> TokenHistory:
    return TokenHistory(attempt, prompt, answer)


def edit_of(params: SamplingParams, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Edit:
    return Edit(params, len(answer), Tally(history(prompt, answer)) if params.has_penalty else None)


params_of = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
    logit_bias=st.sampled_from([(), ((3, -100.0),), ((3, 2.5), (49, -1.0))]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (3, 7)]),
)


@settings(max_examples=100)
@given(seed=st.integers(0, 99), wishes=st.lists(st.tuples(params_of, tokens, tokens), min_size=1, max_size=6))
def test_scores_change_as_in_the_reference(
    seed: int, wishes: list[tuple[SamplingParams, tuple[int, ...], tuple[int, ...]]]
) -> None:
    scores = scores_of(seed, len(wishes))
    expected = [
        reference.edited(row, params, prompt, answer)
        for row, (params, prompt, answer) in zip(scores, wishes, strict=True)
    ]
    got = scores.clone()
    edit(got, [edit_of(*wish) for wish in wishes])
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=1e-5)
    for row, (params, _, answer) in enumerate(wishes):
        assert is_edited(params, len(answer)) or torch.equal(got[row], scores[row])


def test_the_repetition_penalty_is_that_of_the_reference_implementation() -> None:
    scores, prompt, answer = scores_of(1), (3, 9, 9), (4, 9)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[*prompt, *answer]]), scores)
    got = scores.clone()
    edit(got, [edit_of(SamplingParams(1, repetition_penalty=1.4), prompt, answer)])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert not torch.equal(got, scores)


def test_ids_past_the_vocabulary_change_nothing() -> None:
    scores = scores_of(1)
    wish = SamplingParams(
        1, stop_token_ids=(VOCAB,), min_tokens=5, logit_bias=((VOCAB + 9, 3.0),), presence_penalty=1.0
    )
    got = scores.clone()
    edit(got, [edit_of(wish, (VOCAB + 1,), (VOCAB + 2,))])
    assert torch.equal(got, scores)


def test_no_stop_token_is_chosen_before_min_tokens() -> None:
    scores = scores_of(2)
    stop = int(scores.argmax())
    params = SamplingParams(9, temperature=0.0, stop_token_ids=(stop,), min_tokens=2)
    chosen = [sample(scores, [SampleRequest(params, 0, position)])[0].token_id for position in range(4)]
    assert [token == stop for token in chosen] == [False, False, True, True]


def test_bias_bans_and_forces() -> None:
    scores = scores_of(3)
    best = int(scores.argmax())
    for temperature in (0.0, 1.0):
        banned = SamplingParams(9, temperature, logit_bias=((best, -100.0),))
        forced = SamplingParams(9, temperature, logit_bias=((7, 100.0),))
        chosen = sample(scores.expand(2, -1), [SampleRequest(params, 0, 0) for params in (banned, forced)])
        assert chosen[0].token_id != best
        assert chosen[1].token_id == 7
    assert math.isfinite(scores[0, best].item())


# --- counting ------------------------------------------------------------------------------------------------------


@given(prompt=tokens, answer=tokens)
def test_counts_grown_token_by_token_are_those_of_the_whole(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    table = TallyTable()
    tally = table.tally(sequence_id(1), history(prompt, ()))
    for length in range(len(answer) + 1):
        tally = table.tally(sequence_id(1), history(prompt, answer[:length]))
        table.check_invariants()
    whole = Tally(history(prompt, answer))
    grown = dict(zip(tally.token_ids.tolist(), tally.counts.tolist(), strict=True))
    assert grown == dict(zip(whole.token_ids.tolist(), whole.counts.tolist(), strict=True))
    assert grown == {token: float(answer.count(token)) for token in {*prompt, *answer}}


def counted(tally: Tally) -> dict[int, float]:
    return dict(zip(tally.token_ids.tolist(), tally.counts.tolist(), strict=True))


def test_one_more_token_is_counted_and_anything_else_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TokenHistory] = []

    class CountedTally(Tally):
        def __init__(self, history: TokenHistory) -> None:
            made.append(history)
            super().__init__(history)

    monkeypatch.setattr(penalties, "Tally", CountedTally)
    table, name = TallyTable(), sequence_id(1)
    steps = [
        (history((1,), ()), 1),  # unknown
        (history((1,), (5,)), 1),
        (history((1,), (5, 6)), 1),
        (history((1,), (5, 6)), 1),  # the same step again
        (history((1,), (5, 6, 7, 8)), 2),  # was elsewhere meanwhile
        (history((1,), (5, 6, 7)), 3),  # an earlier one
        (history((1,), (5, 9, 9, 9), attempt=2), 4),  # another attempt, with other tokens
    ]
    for given_history, num_made in steps:
        tally = table.tally(name, given_history)
        assert len(made) == num_made
        assert counted(tally) == {1: 0.0} | {
            token: float(given_history.answer_ids.count(token)) for token in given_history.answer_ids
        }


def test_tallies_of_sequences_that_are_gone_are_forgotten() -> None:
    table = TallyTable()
    for number in range(1000):
        table.tally(sequence_id(number), history((1,), (2,)))
        table.forget(1)
    assert len(table._tallies) == penalties.MAX_IDLE_TALLIES + 1
    assert sequence_id(999) in table._tallies


def test_wrong_counts_are_found() -> None:
    tally = Tally(history((1,), (2, 2)))
    tally.num_answer_tokens = 3
    with pytest.raises(InternalFault, match="2 tokens counted in an answer of 3"):
        tally.check_invariants()
