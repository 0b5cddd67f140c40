"""The simulated half of the comparison with the live system: what is asked, and on which machine."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from disagg.bench.workload import Workload, WorkRequest
from disagg.core.roles import Role
from disagg.policy.step_time import StepCosts
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.serving import Serving, Speed
from disagg.sim.scenario import Fidelity
from disagg.sim.simulate import simulate


@pytest.fixture
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("simulated_side")


def drawn(work: Workload) -> list[WorkRequest]:
    stream = work.start(random.Random(3))
    found: list[WorkRequest] = []
    while (request := stream.next_request()) is not None:
        found.append(request)
    return found


def test_the_load_comes_after_the_lone_prompts_and_is_the_same(script: Any) -> None:
    work = script.work_of(2.0, 20)
    after = script.AfterLone(work)
    alone, both = drawn(work), drawn(after)
    lone, load = both[: script.LONE_PROMPTS], both[script.LONE_PROMPTS :]
    assert {request.num_prompt_tokens for request in lone} == {script.LONE_PROMPT}
    assert [request.number for request in both] == list(range(len(both)))
    assert [request.runs for request in load] == [request.runs for request in alone]
    assert [request.due_s - after.start_s for request in load] == pytest.approx([each.due_s for each in alone])
    assert len({run.label for request in both for run in request.runs}) == len(both)


def test_sides_are_played_on_the_machine_as_fast_as_it_is(script: Any) -> None:
    costs = StepCosts(0.02, 1e-3, 1e-7, 1e-3, 1e-6)
    serving = Serving(costs, request_s=0.004, handoff_s=0.002, prompt_step_s=0.003)
    here = script.Here(Profile("m", "h", "fp32", "float32", 4, 64, 8192, costs, serving=serving), serving, 0.0, 0.1)
    slo = script.slo_of(here)
    assert [side.workers for side in script.SIDES] == [("prefill-0", "decode-0"), ("mixed-0", "mixed-1")]
    for side in script.SIDES:
        reports = [
            simulate(script.scenario_of(side, here.at(speed), script.work_of(1.0, 20), slo, Fidelity.SMALL), 1).report
            for speed in (Speed(), Speed(2.0, 2.0))
        ]
        assert reports[0].num_finished == 20
        assert 1.8 < reports[1].tpot_s.p50 / reports[0].tpot_s.p50 < 2.6
        assert {use.role for use in reports[0].workers} == set(side.roles)
        workers = script.scenario_of(side, here, script.work_of(1.0, 20), slo, Fidelity.SMALL).workers
        assert {(spec.step_costs, spec.itl_target_s) for spec in workers} == {(costs, 0.1)}
    assert Role.PREFILL in script.SIDES[0].roles
