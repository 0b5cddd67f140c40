"""Published scenarios run by our simulator: what their systems do is said in the terms of ours.

order      earlier requests have the higher priority: prompts are read in order of arrival, as those systems do
batches    a step reads up to max_tokens prompt tokens, beside streams or, where the engine does so, instead of them
hand-off   KV moves when a prompt is done, as DistServe does it; decode workers read no prompts
admission  nobody is turned away
"""

from disagg.bench.arrivals import PoissonArrivals
from disagg.bench.workload import ClosedWork, RandomWork, Workload
from disagg.bench.workload import Lengths as DrawnLengths
from disagg.core.errors import ConfigurationError
from disagg.core.roles import HandoffMode, Role
from disagg.sim import scenario as simulated
from disagg.sim.hardware import catalogue
from disagg.sim.simulate import simulate
from disagg.sim.validation.chat_work import ChatWork
from disagg.sim.validation.scenario import Lengths, Load, Outcome, Scenario, WorkerGroup

BLOCK_SIZE = 16
_NO_LIMIT = 1e12  # of promised KV over KV that exists


def run_scenario(scenario: Scenario) -> Outcome:
    """Raises ConfigurationError for work or workers that cannot be."""
    outcome = simulate(simulated_form(scenario), scenario.seed)
    report = outcome.report
    return Outcome(
        attainment=report.attainment,
        ttft_mean_s=report.ttft_s.mean,
        tpot_mean_s=report.tpot_s.mean,
        ttft_attainment=report.ttft_attainment,
        tpot_attainment=report.tpot_attainment,
    )


def simulated_form(scenario: Scenario) -> simulated.Scenario:
    """The same in the simulator's terms. Raises ConfigurationError."""
    link = catalogue.link(scenario.link)
    nic = simulated.Link(link.bytes_s, link.latency_us / 1e6)
    return simulated.Scenario(
        workers=tuple(spec for group in scenario.groups for spec in _specs(group, nic, _parked(scenario, group))),
        work=_work(scenario.load),
        slo=simulated.Slo(scenario.ttft_s, scenario.tpot_s),
        fidelity=simulated.Fidelity.LARGE,
        local_prefill_tokens=0,
        max_claimed_share=_NO_LIMIT,
    )


def _room(group: WorkerGroup) -> int:
    """KV tokens of one of its workers."""
    return group.model.max_kv_tokens(BLOCK_SIZE)


def _parked(scenario: Scenario, group: WorkerGroup) -> int:
    """KV tokens of prefill workers that each of these decode workers may count as its own."""
    if group.role is not Role.DECODE:
        return 0
    return sum(each.count * _room(each) for each in scenario.groups if each.role is Role.PREFILL) // group.count


def _specs(group: WorkerGroup, nic: simulated.Link, num_parked: int) -> list[simulated.WorkerSpec]:
    return [
        simulated.WorkerSpec(
            name=f"{group.role.value}-{index}",
            role=group.role,
            steps=group.model,
            num_blocks=(_room(group) + num_parked) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            chunk_tokens=group.max_tokens,
            mixed_chunk_tokens=group.max_tokens,
            max_running=group.max_requests,
            prompts_alone=group.prompts_alone,
            handoff_mode=HandoffMode.SYNC,
            nic=nic,
        )
        for index in range(group.count)
    ]


def _work(load: Load) -> Workload:
    if load.lengths is Lengths.SHAREGPT:
        if not load.rate_rps or not load.max_total:
            raise ConfigurationError(f"{load}: chats need an arrival rate and a limit of tokens")
        return ChatWork(
            num_requests=load.num_requests,
            arrivals=PoissonArrivals(load.rate_rps),
            mean_prompt=load.mean_prompt,
            mean_answer=load.mean_answer,
            max_total=load.max_total,
        )
    work = RandomWork(
        num_requests=load.num_requests,
        arrivals=PoissonArrivals(load.rate_rps or 1.0),
        prompt=DrawnLengths(load.mean_prompt, load.spread * load.mean_prompt),
        output=DrawnLengths(load.mean_answer, load.spread * load.mean_answer),
    )
    return ClosedWork(work, load.concurrency) if load.concurrency else work
