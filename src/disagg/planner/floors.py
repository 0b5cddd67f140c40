"""Targets that nobody can meet, and which physical floor breaks them."""

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.planner.estimate import Estimator, Target
from disagg.planner.fleet import Cut, Steps
from disagg.planner.traffic import Traffic
from disagg.sim.hardware.step_model import StepShape

WHOLE = 1 << 20  # a prompt in one piece


class PromptFloor(msgspec.Struct, frozen=True):
    """The prompt that the target's share of requests do not exceed, alone on the worker that reads it fastest."""

    num_tokens: int  # to compute, with an endless cache
    cut: Cut
    alone_s: float


def prompt_floor(steps: Steps, traffic: Traffic, target: Target) -> PromptFloor:
    """Below it TTFT cannot be for that share. Raises ConfigurationError where the model fits nowhere."""
    estimator = Estimator(steps, traffic, target)
    ordered = sorted(zip(traffic.uncached, (r.num_prompt_tokens for r in traffic.requests), strict=True))
    new, prompt = ordered[int(target.share * (len(ordered) - 1))]
    cut = min(steps.cuts(), key=lambda cut: estimator.prompt_s(cut, new, prompt - new, WHOLE))
    return PromptFloor(new, cut, steps.of(cut).step_s(StepShape(((new, prompt - new),))))


def check_floors(steps: Steps, traffic: Traffic, target: Target) -> None:
    """Raises ConfigurationError where even an idle fleet misses: prompts alone for TTFT, one stream alone for TPOT."""
    cuts = steps.cuts()
    longest = sorted(request.num_prompt_tokens + request.num_output_tokens for request in traffic.requests)
    wanted = longest[int(target.share * (len(longest) - 1))]
    model = steps.fleet.model
    if model.max_context and model.max_context < wanted:
        raise ConfigurationError(
            f"{target.share:.0%} of requests are up to {wanted} tokens long, the context of {model.name} is "
            f"{model.max_context}; ask for shorter ones, or take another model"
        )
    floor, slo = prompt_floor(steps, traffic, target), target.slo
    if floor.alone_s > slo.ttft_s:
        raise ConfigurationError(
            f"TTFT of {slo.ttft_s:g} s for {target.share:.0%} of requests cannot be met: a prompt of "
            f"{floor.num_tokens} tokens to compute, alone on the fastest worker ({floor.cut}), takes "
            f"{floor.alone_s:.3g} s of prefill; allow more, ask for a smaller share, or take faster devices"
        )
    check_tpot(steps, cuts, target)
    room = max(steps.kv_tokens(cut) for cut in cuts)
    if room < wanted:
        missing_gb = (wanted - room) * steps.of(cuts[0]).kv_bytes_per_token / 1e9
        raise ConfigurationError(
            f"{target.share:.0%} of requests are up to {wanted} tokens long, the largest KV cache of one worker holds "
            f"{room}: {missing_gb:.1f} GB too little; use larger devices, more per worker, or a narrower KV"
        )


def check_tpot(steps: Steps, cuts: tuple[Cut, ...], target: Target) -> None:
    """Raises ConfigurationError where reading the weights for one token takes longer than TPOT."""
    alone = StepShape((), 1, 1)
    cut = min(cuts, key=lambda cut: steps.of(cut).step_s(alone))
    model = steps.of(cut)
    alone_s = model.step_s(alone)
    if alone_s <= target.slo.tpot_s:
        return
    read_s = model.weight_bytes_per_rank() * cut.pp / model.device.memory_bytes_s
    raise ConfigurationError(
        f"TPOT of {1e3 * target.slo.tpot_s:.3g} ms cannot be met: one token alone on the fastest worker ({cut}) takes "
        f"{1e3 * alone_s:.3g} ms, of which reading the weights at the memory's full rate is {1e3 * read_s:.3g} ms; "
        "allow more, use narrower weights, or more devices per worker"
    )
