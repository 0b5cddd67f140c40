"""Rotary positions stretched past the context a model was first trained on: one divisor per frequency, one factor.

default   nothing changes
linear    every frequency is divided by `factor`
llama3    short waves are kept, long ones divided, those between blended (Llama 3.1)
yarn      the same with a ramp over the pairs' indices, and a factor on cos and sin (Peng et al., arXiv 2309.00071)
"""

import math
from typing import NamedTuple

import msgspec

KINDS = ("default", "linear", "llama3", "yarn")


class RopeScaling(msgspec.Struct, frozen=True):
    """How a model's files describe the stretching. Contexts count tokens; None: what the kind implies."""

    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: turns over the original context from which on a wave is kept
    beta_slow: float = 1.0  # and below which it is divided
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: the ramp's ends are whole pairs


class RopeFactors(NamedTuple):
    """What is left of a scaling once the geometry is known."""

    divisors: tuple[float, ...] = ()  # of the head_dim / 2 frequencies; empty: all 1
    attention_factor: float = 1.0  # on cos and sin


def rope_factors(scaling: RopeScaling, head_dim: int, theta: float) -> RopeFactors:
    """Divisors and factor for heads of head_dim whose frequencies are theta ** (-2 i / head_dim).

    Raises ValueError for a kind that is not in KINDS and for a factor that is no positive number.
    """
    if scaling.kind not in KINDS:
        raise ValueError(f"rope scaling {scaling.kind!r} is unknown; known: {', '.join(KINDS)}")
    if scaling.kind == "default":
        return RopeFactors()
    if not 0 < scaling.factor < math.inf or scaling.original_context < 1:
        raise ValueError(
            f"rope scaling {scaling.kind!r} with factor={scaling.factor} over {scaling.original_context} tokens; "
            "both must be positive numbers"
        )
    pairs = range(head_dim // 2)
    if scaling.kind == "linear":
        return RopeFactors(tuple(scaling.factor for _ in pairs))
    if scaling.kind == "llama3":
        return RopeFactors(tuple(_blend(scaling, _llama3_kept(scaling, head_dim, theta, pair)) for pair in pairs))
    low, high = _yarn_ramp(scaling, head_dim, theta)
    kept = [1.0 - min(max((pair - low) / (high - low), 0.0), 1.0) for pair in pairs]
    return RopeFactors(tuple(_blend(scaling, share) for share in kept), _yarn_attention_factor(scaling))


def _blend(scaling: RopeScaling, kept: float) -> float:
    """The divisor of a frequency of which the share `kept` stays as it was."""
    return 1.0 / (kept + (1.0 - kept) / scaling.factor)


def _llama3_kept(scaling: RopeScaling, head_dim: int, theta: float, pair: int) -> float:
    turns = scaling.original_context * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return float(min(max((turns - low) / (high - low), 0.0), 1.0))


def _yarn_ramp(scaling: RopeScaling, head_dim: int, theta: float) -> tuple[float, float]:
    """The pairs between which frequencies go from kept to divided."""

    def pair_that_turns(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else low + 0.001


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
