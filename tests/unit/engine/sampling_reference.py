"""How a token is chosen, one row at a time and token by token: slow, and plain enough to be believed."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.core.request import SamplingParams

MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """splitmix64's finisher."""
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def noise_key(seed: int, choice: int, position: int) -> int:
    state = 0
    for part in (seed, choice, position):
        state = splitmix((state ^ (part & MASK)) + 0x9E3779B97F4A7C15)
    return state


def uniform(key: int, token_id: int) -> float:
    return ((splitmix(key + (token_id + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) * 2.0**-52


def edited(row: Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Scores [vocab_size] after bias, penalties and the mask of stop ids, in that order."""
    row = row.clone()
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    for token_id in {*prompt, *answer}:
        row[token_id] *= params.repetition_penalty if row[token_id] <= 0 else 1 / params.repetition_penalty
    for token_id, count in Counter(answer).items():
        row[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if len(answer) < params.min_tokens:
        row[list(params.stop_token_ids)] = -math.inf
    return row


def kept_tokens(row: Tensor, params: SamplingParams) -> list[int]:
    """Ids, ascending, that may be drawn."""
    scaled = row.double() / params.temperature
    order = sorted(range(len(row)), key=lambda token_id: (-scaled[token_id].item(), token_id))
    if 0 < params.top_k < len(row):
        floor = scaled[order[params.top_k - 1]]
        order = [token_id for token_id in order if scaled[token_id] >= floor]
    masses = torch.softmax(scaled[order], 0).tolist()
    nucleus: list[int] = []
    total = 0.0
    for token_id, mass in zip(order, masses, strict=True):
        if nucleus and params.top_p < 1.0 and total >= params.top_p:
            break
        nucleus.append(token_id)
        total += mass
    floor = scaled[order[0]] + (math.log(params.min_p) if params.min_p else -math.inf)
    return sorted(token_id for token_id in nucleus if scaled[token_id] >= floor)


def drawn(row: Tensor, params: SamplingParams, choice: int, position: int) -> int:
    """The token of one row whose scores are edited already."""
    if params.is_greedy:
        return int(row.argmax())
    key = noise_key(params.seed, choice, position)
    scaled = (row.double() / params.temperature).tolist()
    return max(kept_tokens(row, params), key=lambda each: scaled[each] - math.log(-math.log(uniform(key, each))))
