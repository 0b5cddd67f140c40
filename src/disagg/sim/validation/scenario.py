"""Whole clusters under load, described so that any simulator can run them."""

import enum
from collections.abc import Callable

import msgspec

from disagg.core.roles import Role
from disagg.sim.hardware.step_model import StepModel


class Lengths(enum.StrEnum):
    """How prompt and answer lengths are drawn."""

    EVEN = "even"  # evenly on either side of the means, as far as `spread` says: alike where that is 0
    SHAREGPT = "sharegpt"  # chat: means as given, long-tailed, cut at max_total tokens


class Load(msgspec.Struct, frozen=True):
    """Requests. rate_rps: Poisson arrivals of the whole cluster; concurrency: a closed loop instead."""

    lengths: Lengths
    mean_prompt: float  # tokens
    mean_answer: float
    num_requests: int
    rate_rps: float = 0.0
    concurrency: int = 0
    max_total: int = 0  # tokens of prompt and answer; 0: no limit
    spread: float = 0.0  # of EVEN, as a share of the means


class WorkerGroup(msgspec.Struct, frozen=True):
    """Equal workers."""

    role: Role
    count: int
    model: StepModel
    num_devices: int  # of each worker
    max_requests: int  # of one step
    max_tokens: int  # of one step's prompts
    prompts_alone: bool = False  # whether streams stand still while prompts are read


class Scenario(msgspec.Struct, frozen=True):
    """One run. Targets decide what attainment means; a request that misses either misses."""

    name: str
    groups: tuple[WorkerGroup, ...]
    link: str  # between prefill and decode, an entry of the catalogue's links
    load: Load
    ttft_s: float
    tpot_s: float
    seed: int = 0

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.num_devices for group in self.groups)


class Outcome(msgspec.Struct, frozen=True):
    """What a run says; means are over requests, attainment is 0 to 1."""

    attainment: float
    ttft_mean_s: float
    tpot_mean_s: float
    ttft_attainment: float
    tpot_attainment: float


RunScenario = Callable[[Scenario], Outcome]


def goodput_per_device(attained: list[tuple[float, float]], wanted: float) -> float:
    """The rate up to which `wanted` is attained, between measured (rate per device, attainment) by a straight line.

    0 if the lowest rate already falls short; the highest rate if none does.
    """
    held = 0.0
    previous: tuple[float, float] | None = None
    for rate, share in sorted(attained):
        if share < wanted:
            if previous is None:
                return 0.0
            before, above = previous
            return before + (rate - before) * (above - wanted) / (above - share)
        held, previous = rate, (rate, share)
    return held
