"""The simulated half of simulated_live.py: the live system's defaults on this machine, and what is asked of it."""

import random
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import EvenArrivals, PoissonArrivals
from disagg.bench.search import RateSearch
from disagg.bench.slo import Slo
from disagg.bench.workload import Lengths, OpenStream, RandomWork, Run, Workload, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.router.config import RouterConfig
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.serving import Serving, Speed
from disagg.sim.profiled import profiled_worker
from disagg.sim.scenario import Fault, Fidelity, Scenario, WorkerSpec
from disagg.sim.simulate import simulate
from disagg.worker.config import WorkerConfig

NUM_BLOCKS = 512
LOCAL_TOKENS = 64  # prompts up to so many are read by the decode worker: both paths are played
PROMPT = Lengths(160, 110, is_lognormal=True, least=16, most=480)
ANSWER = Lengths(32, 14, is_lognormal=True, least=8, most=80)
TARGET_SHARE = 0.9
SEARCH_RUNS, SEARCH_REQUESTS = 12, 250
LONE_PROMPTS, LONE_PROMPT, LONE_ANSWER = 4, 160, 24  # of a lone client, before and after each load
LONE_EVERY_S = 10.0
LONE_LABEL = 1 << 40  # of their prompts on: no other ones'


class Side(msgspec.Struct, frozen=True):
    """One way to use two cores."""

    name: str
    pools: tuple[str, ...]
    roles: tuple[Role, ...]

    @property
    def workers(self) -> tuple[str, ...]:
        """As they are called on both sides."""
        return tuple(f"{role.value}-{self.roles[:n].count(role)}" for n, role in enumerate(self.roles))


SIDES = (
    Side("1 prefill + 1 decode", ("--prefill", "1", "--decode", "1"), (Role.PREFILL, Role.DECODE)),
    Side("2 mixed", ("--mixed", "2"), (Role.MIXED, Role.MIXED)),
)


class Here(msgspec.Struct, frozen=True):
    """This machine, as profiled. foreign_share: what others took of all cores while it was."""

    profile: Profile
    serving: Serving
    foreign_share: float
    itl_target_s: float  # that workers keep beside prompts

    def at(self, speed: Speed) -> "Here":
        """On the machine as fast as it is now."""
        serving = self.serving.at(speed)
        profile = msgspec.structs.replace(self.profile, serving=serving)
        return msgspec.structs.replace(self, profile=profile, serving=serving)


class AfterLone(msgspec.Struct, frozen=True):
    """The load after what a lone client asked before: live workers have learned their step times from that."""

    work: RandomWork

    @property
    def start_s(self) -> float:
        """When the load begins."""
        return LONE_PROMPTS * LONE_EVERY_S

    def start(self, rng: random.Random) -> WorkStream:
        return OpenStream(self._requests(rng))

    def _requests(self, rng: random.Random) -> Iterator[WorkRequest]:
        """Numbers of the load are its own ones and LONE_PROMPTS."""
        lone = lone_work().start(random.Random(0))
        while (request := lone.next_request()) is not None:
            runs = tuple(Run(run.label + LONE_LABEL, run.num_tokens) for run in request.runs)
            yield msgspec.structs.replace(request, runs=runs, due_s=request.number * LONE_EVERY_S)
        load = self.work.start(rng)
        while (request := load.next_request()) is not None:
            due_s = request.due_s + self.start_s
            yield msgspec.structs.replace(request, number=request.number + LONE_PROMPTS, due_s=due_s)


def lone_work() -> RandomWork:
    return RandomWork(
        num_requests=LONE_PROMPTS,
        arrivals=EvenArrivals(1.0),
        prompt=Lengths(LONE_PROMPT),
        output=Lengths(LONE_ANSWER),
    )


def work_of(rate_per_s: float, num_requests: int) -> RandomWork:
    return RandomWork(num_requests=num_requests, arrivals=PoissonArrivals(rate_per_s), prompt=PROMPT, output=ANSWER)


def slo_of(here: Here) -> Slo:
    """Four times what a mean prompt takes alone, and the target that workers keep beside prompts."""
    prompt_s = here.serving.request_s + here.serving.step_of_prompt_s(round(PROMPT.mean))
    return Slo(ttft_s=round(4 * prompt_s, 3), tpot_s=here.itl_target_s)


def scenario_of(
    side: Side,
    here: Here,
    work: Workload,
    slo: Slo,
    fidelity: Fidelity,
    faults: tuple[Fault, ...] = (),
    max_timelines: int = 0,
) -> Scenario:
    """The live system's defaults, on this machine."""
    router = RouterConfig(models=(("-", "-"),))
    return Scenario(
        workers=tuple(_worker(*each, here) for each in zip(side.workers, side.roles, strict=True)),
        work=work,
        slo=slo,
        fidelity=fidelity,
        local_prefill_tokens=LOCAL_TOKENS,
        max_open_requests=router.max_open_requests,
        contention=here.serving.contention,
        request_s=here.serving.request_s,
        faults=faults,
        max_timelines=max_timelines,
    )


def _worker(name: str, role: Role, here: Here) -> WorkerSpec:
    live = WorkerConfig(
        model="-",
        served_name="-",
        role=role,
        worker_id=name,
        router_address="-",
        num_blocks=NUM_BLOCKS,
        itl_target_s=here.itl_target_s,
    )
    return profiled_worker(live, here.profile)


def highest_rate(side: Side, here: Here, slo: Slo, seed: int) -> float:
    """Of those that attain the target in the simulator."""
    search = RateSearch(1.0, TARGET_SHARE, max_runs=SEARCH_RUNS, narrow=1.05)
    while (rate_per_s := search.next_rate()) is not None:
        scenario = scenario_of(side, here, work_of(rate_per_s, SEARCH_REQUESTS), slo, Fidelity.LARGE)
        report = simulate(scenario, seed + len(search.trials)).report
        search.tell(rate_per_s, round(report.attainment * report.num_requests), report.num_requests)
    rate_per_s = search.limit().rate_per_s
    if not rate_per_s:
        raise ConfigurationError(
            f"{side.name} attains {slo} at no rate: the machine is busy, or was when it was profiled"
        )
    return rate_per_s
