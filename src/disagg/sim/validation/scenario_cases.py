"""Cases that need a cluster under load. They say what to run; who calls them brings the simulator."""

import statistics
from collections.abc import Callable

import msgspec

from disagg.core.roles import Role
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.published import published_model
from disagg.sim.validation.foreign_tables import SiliconGroup, SiliconPoint, silicon_points
from disagg.sim.validation.scenario import Lengths, Load, RunScenario, Scenario, WorkerGroup, goodput_per_device
from disagg.sim.validation.step_cases import MS, Values

ATTAINMENT = 0.9
CHAT = Load(Lengths.SHAREGPT, mean_prompt=755.5, mean_answer=200.3, num_requests=0, max_total=2048)
RATES_13B = (0.25, 0.5, 1.0, 1.5, 2.0, 2.25, 2.5, 3.0)  # requests/s per device, as published
RATES_66B = (0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
RATES_66B_MIXED = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
PLAN_STEP = 0.25  # requests/s per device: how finely DistServe's own search looks
PLAN_LIMIT = 5.0
WAITED_STEPS = 20
CLOSED_LOOP_ROUNDS = 10  # requests per place in the loop; the first round starts all at once
PLAYED_ROUNDS = 3  # of these: all but the first are alike
LEAST_SHARE = 0.8  # of the lengths that are named: those of requests lie evenly between it and all of them


def apart(name: str, prefill: tuple[int, int], decode: tuple[int, int], ttft_s: float, tpot_s: float) -> Scenario:
    """One prefill and one decode worker of DistServe, each (tp, pp), inside one node; no load yet."""
    groups = (
        _opt_group(name, Role.PREFILL, prefill, "DistServe", max_requests=128, max_tokens=8192),
        _opt_group(name, Role.DECODE, decode, "DistServe", max_requests=1024, max_tokens=65536),
    )
    return Scenario(f"{name} apart", groups, "NVLink3", CHAT, ttft_s, tpot_s)


def together(name: str, tp: int, ttft_s: float, tpot_s: float) -> Scenario:
    """One worker of the vLLM of 2023, which DistServe profiled as well: it did not mix prompts and streams."""
    group = _opt_group(name, Role.MIXED, (tp, 1), "vLLM", max_requests=1024, max_tokens=16384)
    group = msgspec.structs.replace(group, prompts_alone=True)
    return Scenario(f"{name} mixed", (group,), "NVLink3", CHAT, ttft_s, tpot_s)


def under(scenario: Scenario, rate_per_device: float, requests_per_device: int) -> Scenario:
    """The same under Poisson arrivals."""
    devices = scenario.num_devices
    load = Load(
        scenario.load.lengths,
        scenario.load.mean_prompt,
        scenario.load.mean_answer,
        num_requests=requests_per_device * devices,
        rate_rps=rate_per_device * devices,
        max_total=scenario.load.max_total,
    )
    name = f"{scenario.name} at {rate_per_device:g}/s per device"
    return Scenario(name, scenario.groups, scenario.link, load, scenario.ttft_s, scenario.tpot_s, scenario.seed)


def attained(run: RunScenario, scenario: Scenario, rates: tuple[float, ...], per_device: int) -> list[float]:
    """Percent of requests within the targets, by rate."""
    return [100 * run(under(scenario, rate, per_device)).attainment for rate in rates]


def opt_13b(run: RunScenario) -> Values:
    """DS-FIG8-13B: 100 requests per device at each rate."""
    split, mixed = apart("OPT-13B", (2, 1), (1, 1), 0.25, 0.1), together("OPT-13B", 1, 0.25, 0.1)
    ours, theirs = attained(run, split, RATES_13B, 100), attained(run, mixed, RATES_13B, 100)
    return _compared(RATES_13B, ours, RATES_13B, theirs, below_knee=6)


def opt_66b(run: RunScenario) -> Values:
    """DS-FIG8-66B: 25 requests per device at each rate."""
    split, mixed = apart("OPT-66B", (4, 1), (2, 2), 2.5, 0.15), together("OPT-66B", 4, 2.5, 0.15)
    ours, theirs = attained(run, split, RATES_66B, 25), attained(run, mixed, RATES_66B_MIXED, 25)
    return _compared(RATES_66B, ours, RATES_66B_MIXED, theirs, below_knee=5)


def distserve_plan(run: RunScenario) -> Values:
    """DS-SIM-README: the best of four devices' cuts, 300 requests, 200 and 100 ms."""
    best = (0.0, 0, 0)
    for prefill in (1, 2):
        for decode in (1, 2):
            scenario = apart("OPT-13B", (prefill, 1), (decode, 1), 0.2, 0.1)
            best = max(best, (_highest_rate(run, scenario), prefill, decode))
    rate, prefill, decode = best
    return {"best rate per device": [rate], "tp of prefill and decode": [float(prefill), float(decode)]}


def llama_ttft(run: RunScenario) -> Values:
    """AIC-L70-TTFT: closed loops over the concurrencies that calibrated nothing."""
    errors: dict[str, list[float]] = {"vllm": [], "trtllm": []}
    for point in silicon_points():
        if point.order % 2 == 1:
            errors[point.group.backend].append(abs(_loop_ttft_s(run, point) / point.ttft_s - 1))
    return {f"TTFT {name}, held-back points": [100 * statistics.fmean(each)] for name, each in errors.items()}


def _waited_steps(group: SiliconGroup) -> int:
    """How long these runs' set-up lets a prompt wait for others to come; when all come at once, it does not."""
    is_waiting = (group.backend, group.prompt, group.answer) == ("trtllm", 1024, 1024) and group.tp < 8
    return WAITED_STEPS if is_waiting else 0


def _loop_ttft_s(run: RunScenario, point: SiliconPoint) -> float:
    """Mean over all rounds: the first, when all prompts come at once, and the later ones."""
    first_s, some = run(_closed_loop(point, 1)).ttft_mean_s, run(_closed_loop(point, PLAYED_ROUNDS))
    later_s = (PLAYED_ROUNDS * some.ttft_mean_s - first_s) / (PLAYED_ROUNDS - 1)
    later_s += _waited_steps(point.group) * some.tpot_mean_s
    return (first_s + (CLOSED_LOOP_ROUNDS - 1) * later_s) / CLOSED_LOOP_ROUNDS


def _compared(
    rates: tuple[float, ...], ours: list[float], mixed_rates: tuple[float, ...], mixed: list[float], below_knee: int
) -> Values:
    split_rps = goodput_per_device(_shares(rates, ours), ATTAINMENT)
    mixed_rps = goodput_per_device(_shares(mixed_rates, mixed), ATTAINMENT)
    return {
        "attainment apart, below the knee": ours[:below_knee],
        "attainment apart, past the knee": ours[below_knee:],
        "attainment mixed": mixed,
        "goodput apart": [split_rps],
        "goodput mixed": [mixed_rps],
        "gain": [split_rps / mixed_rps if mixed_rps else float("inf")],
    }


def _shares(rates: tuple[float, ...], percent: list[float]) -> list[tuple[float, float]]:
    return [(rate, value / 100) for rate, value in zip(rates, percent, strict=True)]


def _highest_rate(run: RunScenario, scenario: Scenario) -> float:
    """By halving, as DistServe's search does, for which TTFT and TPOT are two targets; requests/s per device."""
    low, high = 0.0, PLAN_LIMIT
    requests = -(-300 // scenario.num_devices)
    while high - low > PLAN_STEP:
        middle = (low + high) / 2
        outcome = run(under(scenario, middle, requests))
        if min(outcome.ttft_attainment, outcome.tpot_attainment) >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return low


def _opt_group(
    name: str, role: Role, cut: tuple[int, int], engine: str, *, max_requests: int, max_tokens: int
) -> WorkerGroup:
    tp, pp = cut
    model = published_model(name, engine=engine, tp=tp, pp=pp)
    return WorkerGroup(role, 1, model, tp * pp, max_requests, max_tokens)


def _closed_loop(point: SiliconPoint, rounds: int) -> Scenario:
    worker = point.group
    # Their set-up keeps KV in FP8, or there is no room. (vLLM's constants were fitted as if it were 16 bits.)
    model = worker.worker(kv=Precision.FP8)
    group = WorkerGroup(Role.MIXED, 1, model, worker.tp, max_requests=256, max_tokens=8192)
    mean = (1 + LEAST_SHARE) / 2
    load = Load(
        Lengths.EVEN,
        mean * worker.prompt,
        mean * worker.answer,
        num_requests=rounds * point.concurrency,
        concurrency=point.concurrency,
        spread=(1 - mean) / mean,
    )
    name = f"{worker.backend} TP{worker.tp} {worker.prompt}/{worker.answer} x {point.concurrency}"
    return Scenario(name, (group,), "NVLink4", load, ttft_s=MS, tpot_s=MS)


RUNNERS: dict[str, Callable[[RunScenario], Values]] = {
    "DS-FIG8-13B": opt_13b,
    "DS-FIG8-66B": opt_66b,
    "DS-SIM-README": distserve_plan,
    "AIC-L70-TTFT": llama_ttft,
}
