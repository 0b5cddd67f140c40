"""Gumbel noise as a pure function of (seed, choice, output position, token id): no generator has state.

key           one 64-bit number for each drawn token, hashed from (seed, choice, output position)
state         splitmix64's output number token_id + 1 of that key (Steele, Lea, Flood, 2014)
u             its upper 52 bits as a number exactly inside (0, 1)
noise         -log(-log u)

numpy and torch hash to the same bits; logarithms are torch's in both.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27)
_LAST_SHIFT: Final = 31


def noise_keys(seeds: Iterable[int], choices: Iterable[int], positions: Iterable[int]) -> Keys:
    """One key for each row."""
    parts = [np.array([number & _MASK for number in part], np.uint64) for part in (seeds, choices, positions)]
    state = np.zeros_like(parts[0])
    for part in parts:
        state = _finish(_mix((state ^ part) + np.uint64(_GAMMA)))
    return state


def gumbel_noise(keys: Keys, token_ids: Ids) -> Floats:
    """Noise of token ids under keys; the two are broadcast against each other."""
    state = _finish(_mix(keys + _token_steps(token_ids)))
    uniform = ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    logs: Floats = torch.from_numpy(uniform).log_().neg_().log_().neg_().numpy()
    return logs


def token_steps(vocab_size: int) -> Keys:
    """What each token id [vocab_size] adds to a key."""
    return _token_steps(np.arange(vocab_size))


def _token_steps(token_ids: Ids) -> Keys:
    return (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)


def complements(keys: Keys, steps: Keys) -> npt.NDArray[np.float32]:
    """Never more than (1 - u) * 2^32, by at most 4 and float32's rounding: [rows, vocab_size], for keys [rows].

    The last shift only moves bits below the upper 31, so it is left out; a product with the negated factor gives the
    complement for nothing.
    """
    state = _mix(keys[:, None] + steps, is_negated=True)
    upper = state.view(np.uint32)[:, 1::2] if np.little_endian else state.view(np.uint32)[:, ::2]
    below = upper.astype(np.float32)
    below -= 2.0
    return below


def _mix(state: Keys, *, is_negated: bool = False) -> Keys:
    """splitmix64's finisher but for its last shift; overwrites state. is_negated: the result times -1."""
    scratch = np.empty_like(state)
    first, second = _FACTORS[0], -_FACTORS[1] & _MASK if is_negated else _FACTORS[1]
    for shift, factor in zip(_SHIFTS, (first, second), strict=True):
        np.right_shift(state, np.uint64(shift), out=scratch)
        np.bitwise_xor(state, scratch, out=state)
        np.multiply(state, np.uint64(factor), out=state)
    return state


def _finish(state: Keys) -> Keys:
    return state ^ (state >> np.uint64(_LAST_SHIFT))


def torch_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The same as gumbel_noise in torch; keys as int64 have the same 64 bits."""
    state = (token_ids + 1) * _signed(_GAMMA) + keys
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    state = state ^ _shift_right(state, _LAST_SHIFT)
    uniform = (_shift_right(state, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own copies the sign down."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
