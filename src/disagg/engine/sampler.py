"""Choosing the next token from vocabulary scores.

Sampling is the Gumbel-max trick: argmax over the kept tokens of score / temperature + noise, where the noise of a token
is a pure function of (seed, choice, output position, token id). No generator has state, so a sequence can go on
elsewhere and its neighbours in the batch do not matter. The hash is splitmix64 (Steele, Lea, Flood, 2014).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.core.request import SamplingParams, TokenLogprobs

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class SampleRequest(NamedTuple):
    """What one row wants to draw, and where in its answer."""

    params: SamplingParams
    choice: int
    output_position: int


class Sample(NamedTuple):
    """The token drawn for one row."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sample]:
    """One token per row of logits [S, vocab_size] (float32). Greedy ties go to the lowest token id."""
    if not requests:
        return []
    likeliest = logits.argmax(dim=-1).tolist()
    samples: list[Sample] = []
    for row, request, greedy_id in zip(logits, requests, likeliest, strict=True):
        params = request.params
        token_id = greedy_id if params.is_greedy else _draw(row, request)
        wanted = params.num_logprobs
        samples.append(Sample(token_id, None if wanted is None else _logprobs(row, token_id, wanted)))
    return samples


def _draw(row: Tensor, request: SampleRequest) -> int:
    scaled = row.double() / request.params.temperature
    key = noise_key(request.params.seed, request.choice, request.output_position)
    if request.params.top_p >= 1.0:
        token_ids = torch.arange(len(row), device=row.device)
        return int((scaled + gumbel_noise(key, token_ids)).argmax())
    token_ids = nucleus(scaled, request.params.top_p)
    noisy = scaled[token_ids] + gumbel_noise(key, token_ids)
    return int(token_ids[noisy.argmax()])


def nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Ids, ascending, of the smallest set of likeliest tokens with mass >= top_p; ties go to lower ids. At least one.

    Tokens below (1 - top_p) / vocab_size weigh less than 1 - top_p together, so the set lies among the others, and only
    those few are sorted.
    """
    probabilities = torch.softmax(scaled.double(), dim=-1)
    likely = (probabilities * len(probabilities) >= 1.0 - top_p).nonzero().squeeze(1)
    ordered, order = probabilities[likely].sort(descending=True, stable=True)
    mass_before = ordered.cumsum(0) - ordered
    kept = int((mass_before < top_p).sum())
    return likely[order[: max(kept, 1)]].sort().values


def noise_key(seed: int, choice: int, output_position: int) -> int:
    """One 64-bit number per drawn token, from which each candidate's noise is hashed."""
    state = 0
    for part in (seed, choice, output_position):
        state = _mix((state ^ (part & _MASK)) + _GAMMA)
    return state


def _mix(state: int) -> int:
    """splitmix64's finisher on Python integers."""
    state &= _MASK
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return state ^ (state >> _SHIFTS[-1])


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Gumbel noise, float64, of each token id [K] under one key."""
    state = (token_ids + 1) * _signed(_GAMMA) + _signed(key)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    state = state ^ _shift_right(state, _SHIFTS[-1])
    uniform = (_shift_right(state, 12).double() + 0.5) * 2.0**-52  # 52 bits: exactly inside (0, 1)
    return -(-uniform.log()).log()


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own copies the sign down."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _logprobs(row: Tensor, chosen: int, num_top: int) -> TokenLogprobs:
    """Natural logs of the unscaled softmax, likeliest first, ties to lower ids."""
    logs = torch.log_softmax(row.double(), dim=-1)
    num_top = min(num_top, len(logs))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        threshold = logs.topk(num_top).values[-1]
        token_ids = (logs >= threshold).nonzero().squeeze(1)
        pairs = sorted(zip(token_ids.tolist(), logs[token_ids].tolist(), strict=True), key=lambda pair: -pair[1])
        top = tuple(pairs[:num_top])
    return TokenLogprobs(chosen=float(logs[chosen]), top=top)
