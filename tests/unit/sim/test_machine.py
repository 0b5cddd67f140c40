"""Workers of one machine: steps beside each other, and a cluster whose workers share one."""

import msgspec
import pytest
from tests.unit.sim.rigs import LinearSteps, pools, scenario, work, worker

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.workload import Lengths, PrefixPool
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.roles import Role
from disagg.sim.events import EventHeap
from disagg.sim.hardware.serving import Contention
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.machine import Machine
from disagg.sim.scenario import Fidelity, WorkerDies, WorkerSpec
from disagg.sim.simulate import simulate
from disagg.sim.worker import prompt_share

UNLIKE = Contention(
    prompts_beside_prompts=2.0, prompts_beside_streams=1.5, streams_beside_prompts=1.25, streams_beside_streams=1.6
)


class Rig:
    """A machine, and when each mark of each worker was reached."""

    def __init__(self, contention: Contention = UNLIKE) -> None:
        self.heap = EventHeap()
        self.machine = Machine(self.heap, contention)
        self.seen: list[tuple[str, float]] = []

    def begin(self, name: str, prompt_share: float, *own_s: float) -> None:
        marks = [(each_s, lambda: self.seen.append((name, round(self.heap.now_s, 6)))) for each_s in own_s]
        self.machine.begin(name, prompt_share, marks)
        self.machine.check_invariants()

    def run(self) -> list[tuple[str, float]]:
        while self.heap.step():
            self.machine.check_invariants()
        return self.seen


def test_a_step_alone_takes_its_own_time() -> None:
    rig = Rig()
    rig.begin("a", 1.0, 0.25, 1.0)
    assert rig.run() == [("a", 0.25), ("a", 1.0)]


def test_steps_slow_each_other_only_while_both_run() -> None:
    rig = Rig()
    rig.begin("prompt", 1.0, 3.0)
    rig.heap.at(1.0, rig.begin, "streams", 0.0, 0.5, 1.0)
    # Streams take 1.25 times as long, so until 2.25; meanwhile the prompt gets on by 1.25 / 1.5 of a second.
    assert rig.run() == [("streams", 1.625), ("streams", 2.25), ("prompt", round(2.25 + 2 - 1.25 / 1.5, 6))]


def test_what_several_neighbours_cost_adds_up() -> None:
    assert UNLIKE.slowdown(1.0, []) == 1.0
    assert UNLIKE.slowdown(1.0, [1.0, 0.0]) == pytest.approx(1 + 1.0 + 0.5)
    assert UNLIKE.slowdown(0.5, [0.0]) == pytest.approx((1.5 + 1.6) / 2)


def test_nothing_is_heard_of_a_dead_worker_and_the_other_has_the_machine() -> None:
    rig = Rig()
    rig.begin("a", 1.0, 1.0)
    rig.begin("b", 1.0, 1.0)
    rig.heap.at(1.0, rig.machine.stop, "a")
    rig.heap.at(1.0, rig.machine.stop, "a")
    assert rig.run() == [("b", 1.5)]


def test_a_worker_has_one_step_at_a_time() -> None:
    rig = Rig()
    rig.begin("a", 1.0, 1.0)
    with pytest.raises(InternalFault, match="while one runs"):
        rig.begin("a", 1.0, 1.0)


def test_a_neighbour_makes_nothing_shorter() -> None:
    with pytest.raises(ConfigurationError, match=r"streams_beside_prompts is 0\.9"):
        Contention(streams_beside_prompts=0.9)


def test_the_share_of_prompts_is_what_they_add() -> None:
    steps = LinearSteps(base_s=0.004, prompt_token_s=1e-4, stream_s=1e-3)
    assert prompt_share(steps, StepShape(((100, 0),))) == 1.0
    assert prompt_share(steps, StepShape((), 500, 6)) == 0.0
    assert prompt_share(steps, StepShape(((100, 0),), 500, 6)) == pytest.approx(0.5)


def mixed(num: int, **more: object) -> tuple[WorkerSpec, ...]:
    return tuple(worker(f"mixed-{index}", Role.MIXED, machine="here", **more) for index in range(num))


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_two_busy_workers_of_a_machine_take_as_long_as_the_contention_says(fidelity: Fidelity) -> None:
    asked = work(2, prompt=Lengths(256), output=Lengths(1), prefixes=PrefixPool(), arrivals=EvenArrivals(1e9))
    alone, beside = (
        simulate(scenario(mixed(2), asked, fidelity, contention=contention), 0).report.ttft_s
        for contention in (Contention(), UNLIKE)
    )
    step_s = 0.005 + 256e-4
    assert alone.p50 == pytest.approx(step_s, rel=0.02)
    assert beside.p50 - alone.p50 == pytest.approx(step_s, rel=0.02)


def test_both_fidelities_agree_on_a_shared_machine() -> None:
    workers = tuple(msgspec.structs.replace(spec, machine="here") for spec in pools(1, 1))
    small, large = (
        simulate(scenario(workers, work(60, rate_per_s=6), fidelity, contention=UNLIKE), 3).report
        for fidelity in Fidelity
    )
    assert small.num_finished == large.num_finished == 60
    for name in ("ttft_s", "tpot_s"):
        assert getattr(large, name).mean == pytest.approx(getattr(small, name).mean, rel=0.05)


def test_a_worker_that_dies_beside_another_comes_back() -> None:
    faults = (WorkerDies(1.0, "mixed-0", restart_after_s=2.0),)
    outcome = simulate(scenario(mixed(2), work(40), contention=UNLIKE, faults=faults), 1)
    assert outcome.report.num_finished == 40
