"""Choosing tokens: a pure function of scores and coordinates, with the right distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine import sampling_reference as reference
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from disagg.core.request import SamplingParams
from disagg.engine import scans
from disagg.engine.noise import complements, gumbel_noise, noise_keys, token_steps, torch_noise
from disagg.engine.penalties import Tally
from disagg.engine.sampler import SampleRequest, nucleus, sample
from disagg.engine.scans import DeviceScan, HostScan, Places, Scan
from disagg.scheduler.engine import TokenHistory

VOCAB = 97
WIDE_VOCAB = 40_000  # more than half a tile: rows are looked at one by one


def scores_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def request_of(
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    num_logprobs: int | None = None,
    top_k: int = 0,
    min_p: float = 0.0,
) -> SampleRequest:
    params = SamplingParams(9, temperature, top_p, seed, num_logprobs=num_logprobs, top_k=top_k, min_p=min_p)
    return SampleRequest(params, choice, position)


# --- noise -------------------------------------------------------------------------------------------------------


def test_the_hash_is_splitmix64() -> None:
    """Known first outputs of splitmix64 from state 1234567, in numpy and in torch."""
    state = 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    noise = gumbel_noise(np.array([state], np.uint64), np.arange(4))
    for value, bits in zip(noise.tolist(), expected, strict=True):
        uniform = ((bits >> 12) + 0.5) / 2**52
        assert value == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)
    assert torch_noise(torch.tensor([state]), torch.arange(4)).tolist() == noise.tolist()


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel_noise(noise_keys([1], [2], [3]), np.arange(200_000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert bool(np.isfinite(noise).all())


def test_seed_choice_and_position_all_matter() -> None:
    where = [(seed, choice, position) for seed in range(8) for choice in range(8) for position in range(8)]
    keys = noise_keys(*zip(*where, strict=True)).tolist()
    assert len(set(keys)) == 512
    assert keys == [reference.noise_key(*each) for each in where]
    wrapped = noise_keys([-1, 2**64 - 1, 2**63, 0], [0] * 4, [0] * 4).tolist()
    assert wrapped[0] == wrapped[1]
    assert wrapped[2] != wrapped[3]


def test_complements_bound_the_uniforms_from_below() -> None:
    keys = noise_keys(range(40), [0] * 40, [5] * 40)
    steps = token_steps(1000)
    below = complements(keys, steps)
    for row, key in enumerate(keys.tolist()):
        exact = (1.0 - np.array([reference.uniform(key, token_id) for token_id in range(1000)])) * 2**32
        assert (below[row] <= exact * (1 + 1e-6)).all()
        assert (below[row] >= exact * (1 - 1e-6) - 4.0).all()


# --- rows are independent ------------------------------------------------------------------------------------------

wishes = st.builds(
    request_of,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 7),
    position=st.integers(0, 5000),
    num_logprobs=st.sampled_from([None, None, 0, 3]),
    top_k=st.sampled_from([0, 0, 1, 7, VOCAB]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)
edits = st.sampled_from(
    [
        SamplingParams(1),
        SamplingParams(1),
        SamplingParams(1, presence_penalty=0.7, frequency_penalty=-0.3),
        SamplingParams(1, repetition_penalty=1.3, logit_bias=((3, 5.0), (90, -100.0))),
        SamplingParams(1, min_tokens=10_000, stop_token_ids=(1, 50, VOCAB + 3)),
    ]
)


def with_edit(request: SampleRequest, edit: SamplingParams) -> SampleRequest:
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")
    fields = {name: getattr(edit, name) for name in (*names, "stop_token_ids")}
    params = SamplingParams(
        9,
        request.params.temperature,
        request.params.top_p,
        request.params.seed,
        num_logprobs=request.params.num_logprobs,
        top_k=request.params.top_k,
        min_p=request.params.min_p,
        **fields,
    )
    tally = Tally(TokenHistory(1, (3, 4, 4, 5), (4, 9, 9))) if params.has_penalty else None
    return request._replace(params=params, tally=tally)


@settings(max_examples=60)
@given(data=st.data(), scores_seed=st.integers(0, 1000), vocab=st.sampled_from([VOCAB, 128]))
def test_a_row_among_32_of_mixed_kinds_is_what_it_is_alone(data: st.DataObject, scores_seed: int, vocab: int) -> None:
    requests = data.draw(st.lists(st.builds(with_edit, wishes, edits), min_size=32, max_size=32))
    scores = scores_of(scores_seed, rows=32, vocab=vocab)
    kept = scores.clone()
    among = sample(scores, requests)
    assert torch.equal(scores, kept)  # nothing is written to what came from the model
    for row, request in enumerate(requests):
        assert sample(scores[row : row + 1], [request]) == [among[row]]


@pytest.mark.parametrize("rows", [1, 3])
def test_wide_rows_are_what_they_are_alone(rows: int) -> None:
    kinds = [request_of(0.8), request_of(0.8, 0.9), request_of(0.8, top_k=50), request_of(0.8, min_p=0.1)]
    requests = [each._replace(output_position=at) for at in range(rows) for each in kinds]
    scores = scores_of(5, rows=len(requests), vocab=WIDE_VOCAB)
    among = sample(scores, requests)
    for row, request in enumerate(requests):
        assert sample(scores[row : row + 1], [request]) == [among[row]]


# --- the same token as by the plain way --------------------------------------------------------------------------


@settings(max_examples=150)
@given(request=wishes, scores_seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 5.0, 100.0]))
def test_tokens_are_those_of_the_reference(request: SampleRequest, scores_seed: int, scale: float) -> None:
    scores = scores_of(scores_seed) * scale
    expected = reference.drawn(scores[0], request.params, request.choice, request.output_position)
    assert sample(scores, [request])[0].token_id == expected


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 8.0])
def test_the_few_that_are_raced_include_the_winner(scale: float) -> None:
    """Over flat and steep scores, against noise for every token of the vocabulary."""
    scores = scores_of(1, rows=40, vocab=5000) * scale
    requests = [request_of(0.7, seed=row, position=row) for row in range(40)]
    keys = noise_keys(range(40), [0] * 40, range(40))
    noisy = scores.double() / 0.7 + torch_noise(torch.from_numpy(keys.view(np.int64))[:, None], torch.arange(5000))
    assert [each.token_id for each in sample(scores, requests)] == noisy.argmax(dim=1).tolist()


def test_scores_without_end_are_never_or_always_chosen() -> None:
    scores = scores_of(2, rows=4)
    scores[:, 5:] = -math.inf
    scores[1, 40] = math.inf
    scores[2, :] = -math.inf
    requests = [request_of(seed=1), request_of(seed=2), request_of(seed=3), request_of(top_p=0.9)]
    for kind in (requests, [request_of(top_k=3)] * 4, [request_of(min_p=0.1)] * 4, [request_of(0.0)] * 4):
        first, endless, nothing, last = (each.token_id for each in sample(scores, kind))
        assert first < 5
        assert last < 5
        assert endless == 40
        assert 0 <= nothing < VOCAB


def test_scores_that_are_no_numbers_still_give_a_token() -> None:
    scores = torch.full((4, VOCAB), math.nan)
    requests = [request_of(), request_of(top_p=0.5), request_of(top_k=4), request_of(min_p=0.5, num_logprobs=2)]
    assert all(0 <= each.token_id < VOCAB for each in sample(scores, requests))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[1, [40, 7, 90]] = 5.0
    assert [result.token_id for result in sample(scores, [request_of(0.0)] * 3)] == [0, 7, 0]
    assert DeviceScan(scores).likeliest().tolist() == [0, 7, 0]


# --- distributions -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.85}])
def test_cuts_draw_only_from_what_they_keep_in_the_right_shares(cut: dict[str, float]) -> None:
    scores = torch.tensor([3.0, 0.0, 2.0, 1.0, -1.0, 2.0])
    kept = [0, 2, 5]  # 0.90 of the mass together
    requests = [request_of(position=number, **cut) for number in range(3000)]  # type: ignore[arg-type]
    counts = [0] * 6
    for result in sample(scores.expand(3000, -1), requests):
        counts[result.token_id] += 1
    assert [index for index, count in enumerate(counts) if count] == kept
    assert chi_square([counts[i] for i in kept], torch.softmax(scores[kept], 0).tolist()) < 13.8


# --- cuts ----------------------------------------------------------------------------------------------------------


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
    masses = (probabilities.numpy() * 2.0**60).astype(np.int64)
    is_kept = nucleus(masses[None], np.array([2.0**60]), np.array([top_p]))
    got = np.flatnonzero(is_kept[0]).tolist()
    assert set(got) == set(order[: len(got)])  # the likeliest, ties to lower ids
    assert abs(len(got) - len(expected)) <= (1 if abs(mass - top_p) < 1e-9 else 0)


def drawn_set(scores: Tensor, draws: int, **wish: float) -> set[int]:
    requests = [request_of(position=number, **wish) for number in range(draws)]  # type: ignore[arg-type]
    return {each.token_id for each in sample(scores.expand(draws, -1), requests)}


@pytest.mark.parametrize(
    "wish",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.7},
        {"top_k": 8, "min_p": 0.15},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_k": 10, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_what_is_kept_is_what_the_reference_implementation_keeps(wish: dict[str, float], temperature: float) -> None:
    """transformers' warpers in their own order: temperature, top_k, top_p, min_p."""
    scores = scores_of(11, vocab=30) * 0.5
    warped = scores / temperature
    if "top_k" in wish:
        warped = TopKLogitsWarper(int(wish["top_k"]))(torch.empty(1, 0), warped)
    if "top_p" in wish:
        warped = TopPLogitsWarper(wish["top_p"])(torch.empty(1, 0), warped)
    if "min_p" in wish:
        warped = MinPLogitsWarper(wish["min_p"])(torch.empty(1, 0), warped)
    kept = set(warped[0].isfinite().nonzero()[:, 0].tolist())
    assert 1 < len(kept) < 30
    assert drawn_set(scores, 3000, temperature=temperature, **wish) == kept


def test_tokens_as_likely_as_the_last_of_top_k_are_kept() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    assert drawn_set(scores, 400, top_k=2) == {0, 1, 2, 4}
    assert drawn_set(scores, 400, top_k=2, top_p=0.6) == {0, 1}  # of equal ones the lowest ids


def test_no_top_k_is_too_large() -> None:
    scores = scores_of(1, vocab=6)
    assert drawn_set(scores / 10, 400, top_k=6) == drawn_set(scores / 10, 400, top_k=2**31 - 1) == set(range(6))


# --- log probabilities -----------------------------------------------------------------------------------------------


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


def test_each_row_gets_as_many_logprobs_as_it_wants() -> None:
    scores = scores_of(4, rows=6)
    numbers = [None, 0, 5, 1, None, VOCAB]
    results = sample(scores, [request_of(0.0, num_logprobs=number) for number in numbers])
    for row, (number, result) in enumerate(zip(numbers, results, strict=True)):
        assert (result.logprobs is None) == (number is None)
        if result.logprobs is not None and number is not None:
            logs = torch.log_softmax(scores[row].double(), 0)
            values, token_ids = logs.sort(descending=True, stable=True)
            assert result.logprobs.top == tuple(zip(token_ids.tolist(), values.tolist(), strict=True))[:number]
            assert result.logprobs.chosen == values[0].item()


def test_logprobs_do_not_know_of_bias() -> None:
    scores = scores_of(3)
    params = SamplingParams(9, temperature=0.0, num_logprobs=1, logit_bias=((8, 100.0),))
    (result,) = sample(scores, [SampleRequest(params, 0, 0)])
    logs = torch.log_softmax(scores[0].double(), 0)
    assert result.token_id == 8
    assert result.logprobs is not None
    assert result.logprobs.chosen == logs[8].item()
    assert result.logprobs.top[0] == (int(logs.argmax()), logs.max().item())


# --- both kinds of scan ----------------------------------------------------------------------------------------------


def same(places: Places, others: Places) -> None:
    for name in ("rows", "token_ids", "scores", "probabilities"):
        left, right = getattr(places, name), getattr(others, name)
        assert (left is None) == (right is None)
        assert left is None or left.tolist() == right.tolist(), name


@pytest.mark.parametrize("rows", [slice(1, 4), np.array([0, 2, 5])])
def test_a_device_finds_what_a_host_finds(rows: scans.Rows) -> None:
    scores = scores_of(6, rows=6).round(decimals=1)
    both: tuple[Scan, Scan] = HostScan(scores), DeviceScan(scores)
    host, device = both
    assert host.likeliest().tolist() == device.likeliest().tolist()
    counts, temperatures = np.array([1, 5, VOCAB]), np.array([0.5, 1.0, 2.0])
    assert host.kth_largest(rows, counts).tolist() == device.kth_largest(rows, counts).tolist()
    floors = host.kth_largest(rows, counts)
    same(host.not_below(rows, floors), device.not_below(rows, floors))
    least = np.array([0.001, 0.01, 0.0])
    same(host.likely(rows, temperatures, least), device.likely(rows, temperatures, least))
    keys, likeliest = noise_keys([1, 2, 3], [0] * 3, [9] * 3), host.likeliest()[rows]
    few = host.contenders(rows, temperatures, keys, likeliest)
    winners = device.contenders(rows, temperatures, keys, likeliest)
    assert len(few.rows) < 30
    listed = set(zip(few.rows.tolist(), few.token_ids.tolist(), strict=True))
    assert set(zip(winners.rows.tolist(), winners.token_ids.tolist(), strict=True)) <= listed


def test_samples_from_a_device_are_those_from_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(7, rows=8)
    requests = [
        request_of(0.0, num_logprobs=2),
        *(request_of(0.9, seed=seed) for seed in range(3)),
        *(request_of(0.9, 0.8, seed=seed) for seed in range(2)),
        request_of(0.9, top_k=4, top_p=0.9),
        request_of(0.9, min_p=0.1),
    ]
    expected = sample(scores, requests)
    monkeypatch.setattr("disagg.engine.sampler.scan_of", DeviceScan)
    assert sample(scores, requests) == expected


def test_nothing_asked_nothing_drawn() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
