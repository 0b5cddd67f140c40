"""Choosing tokens: a pure function of scores and coordinates, with the right distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.core.request import SamplingParams
from disagg.engine.sampler import SampleRequest, gumbel_noise, noise_key, nucleus, sample

VOCAB = 97


def scores_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def request_of(
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    num_logprobs: int | None = None,
) -> SampleRequest:
    params = SamplingParams(max_tokens=9, temperature=temperature, top_p=top_p, seed=seed, num_logprobs=num_logprobs)
    return SampleRequest(params, choice, position)


def test_the_hash_is_splitmix64() -> None:
    """Known first outputs of splitmix64 from state 1234567, and 64-bit arithmetic in torch equal to Python's."""
    state = 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    noise = gumbel_noise(state, torch.arange(4)).tolist()
    for value, bits in zip(noise, expected, strict=True):
        uniform = ((bits >> 12) + 0.5) / 2**52
        assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise(noise_key(1, 2, 3), torch.arange(200_000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert bool(noise.isfinite().all())


def test_seed_choice_and_position_all_matter() -> None:
    keys = {noise_key(seed, choice, position) for seed in range(8) for choice in range(8) for position in range(8)}
    assert len(keys) == 512
    assert noise_key(-1, 0, 0) == noise_key(2**64 - 1, 0, 0)
    assert noise_key(2**63, 0, 0) != noise_key(0, 0, 0)


@given(
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 7),
    position=st.integers(0, 5000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
)
def test_a_row_does_not_see_its_neighbours(
    seed: int, choice: int, position: int, temperature: float, top_p: float
) -> None:
    scores = scores_of(seed % 1000, rows=5)
    request = request_of(temperature, top_p, seed, choice, position, num_logprobs=3)
    neighbours = [request_of(), request_of(0.0), request_of(0.7, 0.5, seed=9), request_of(num_logprobs=1)]
    (alone,) = sample(scores[2:3], [request])
    among = sample(scores, [*neighbours[:2], request, *neighbours[2:]])
    assert among[2] == alone


def test_greedy_ties_go_to_the_lowest_id() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[1, [40, 7, 90]] = 5.0
    assert [result.token_id for result in sample(scores, [request_of(0.0)] * 3)] == [0, 7, 0]


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize(("temperature", "vary"), [(1.0, "position"), (0.5, "position"), (1.0, "seed")])
def test_tokens_are_drawn_with_their_probabilities(temperature: float, vary: str) -> None:
    """Chi-square with 7 degrees of freedom: 99.9 % of right samplers stay below 24.3. Seeds are fixed."""
    scores = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 0.2, -1.0, 0.7])
    probabilities = torch.softmax(scores / temperature, 0).tolist()
    draws = 4000
    requests = [request_of(temperature, **{vary: number}) for number in range(draws)]
    counts = [0] * 8
    for result in sample(scores.expand(draws, -1), requests):
        counts[result.token_id] += 1
    assert chi_square(counts, probabilities) < 24.3


def test_top_p_draws_only_from_the_nucleus_in_the_right_shares() -> None:
    scores = torch.tensor([3.0, 0.0, 2.0, 1.0, -1.0, 2.0])
    kept = [0, 2, 5]  # 0.90 of the mass together
    requests = [request_of(top_p=0.8, position=number) for number in range(3000)]
    counts = [0] * 6
    for result in sample(scores.expand(3000, -1), requests):
        counts[result.token_id] += 1
    assert [index for index, count in enumerate(counts) if count] == kept
    assert chi_square([counts[i] for i in kept], torch.softmax(scores[kept], 0).tolist()) < 13.8


@given(seed=st.integers(0, 500), top_p=st.floats(0.0, 0.999), vocab=st.integers(1, 300))
def test_the_nucleus_is_the_smallest_likeliest_set(seed: int, top_p: float, vocab: int) -> None:
    scores = scores_of(seed, vocab=vocab)[0].round(decimals=1).double()  # rounding makes ties
    probabilities = torch.softmax(scores, 0)
    order = sorted(range(vocab), key=lambda token: (-probabilities[token].item(), token))
    expected: list[int] = []
    mass = 0.0
    for token in order:
        if expected and mass >= top_p - 1e-12:
            break
        expected.append(token)
        mass += probabilities[token].item()
    got = nucleus(scores, top_p).tolist()
    assert got == sorted(got)
    assert set(got) == set(order[: len(got)])  # the likeliest, ties to lower ids
    assert abs(len(got) - len(expected)) <= (1 if abs(mass - top_p) < 1e-9 else 0)


def test_logprobs_are_of_the_unscaled_scores() -> None:
    scores = scores_of(3)
    scores[0, [10, 20]] = scores.max() + 1  # a tie at the top
    logs = torch.log_softmax(scores[0].double(), 0)
    (result,) = sample(scores, [request_of(0.25, 0.3, num_logprobs=4)])
    assert result.logprobs is not None
    assert result.logprobs.chosen == pytest.approx(logs[result.token_id].item())
    assert [token for token, _ in result.logprobs.top[:2]] == [10, 20]
    assert [value for _, value in result.logprobs.top] == pytest.approx(logs.sort(descending=True).values[:4].tolist())
    (chosen_only,) = sample(scores, [request_of(0.0, num_logprobs=0)])
    assert chosen_only.logprobs is not None
    assert chosen_only.logprobs.top == ()
    (everything,) = sample(scores, [request_of(0.0, num_logprobs=VOCAB + 5)])
    assert everything.logprobs is not None
    assert len(everything.logprobs.top) == VOCAB


def test_nothing_asked_nothing_drawn() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
