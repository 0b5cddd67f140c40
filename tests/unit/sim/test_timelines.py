"""Timelines of simulated requests: laid out like live ones, they add up to what the records say."""

import pytest
from tests.unit.sim.rigs import SLOW, pools, scenario, work, worker

from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.sim.scenario import Fidelity, LinkBreaks, WorkerDies
from disagg.sim.simulate import simulate
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part

REQUEST_S = 0.003


def test_the_stages_of_every_request_add_up_to_its_record() -> None:
    asked = work(30, rate_per_s=12)
    outcome = simulate(scenario(pools(1, 1, nic=SLOW), asked, max_timelines=30, request_s=REQUEST_S), 2)
    assert len(outcome.timelines) == 30
    for record, timeline in zip(outcome.records, outcome.timelines, strict=True):  # both in order of their ends
        (choice,) = timeline.choices
        choice.check_invariants()
        assert timeline.num_prompt_tokens == record.num_prompt_tokens
        assert (choice.path, choice.num_output_tokens) == (record.path, record.num_output_tokens)
        assert choice.ttft_s == pytest.approx(record.ttft_s)
        assert choice.seconds(Part.TTFT, Stage.TOKENISE) == pytest.approx(REQUEST_S)
        assert choice.seconds(Part.TTFT, Stage.UNREPORTED) == 0.0
        assert choice.seconds(Part.TTFT, Stage.PREFILL) > 0.004
        if record.num_output_tokens > 1:
            assert choice.first_gap_s == pytest.approx(record.first_gap_s)
        if record.path == "remote" and record.num_output_tokens > 1:
            assert choice.seconds(Part.FIRST_GAP, Stage.TRANSFER) > 0.001


def test_watching_changes_nothing() -> None:
    faults = (WorkerDies(1.0, "decode-0", 0.5), LinkBreaks(0.5, "prefill-0", "decode-1", 1.0))
    asked = work(40, rate_per_s=15)
    seen, unseen = (
        simulate(scenario(pools(2, 2, nic=SLOW), asked, faults=faults, max_timelines=num), 3) for num in (5, 0)
    )
    assert len(seen.timelines) == 5
    assert unseen.timelines == ()
    assert seen.to_bytes() == unseen.to_bytes()


def test_timelines_need_every_token() -> None:
    with pytest.raises(ConfigurationError, match="timelines need small fidelity"):
        scenario(pools(1, 1), work(), Fidelity.LARGE, max_timelines=1)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_steps_are_told_apart_by_what_they_compute(fidelity: Fidelity) -> None:
    apart = simulate(scenario(pools(1, 1), work(20), fidelity), 0).report.workers
    mixed = simulate(scenario((worker("m", Role.MIXED),), work(20), fidelity), 0).report.workers
    kinds = {use.name: {each.kind for each in use.steps} for use in (*apart, *mixed)}
    assert kinds["prefill-0"] == {"prefill"}
    assert "decode" in kinds["decode-0"]
    assert kinds["m"] == {"both", "decode", "prefill"}
    for use in (*apart, *mixed):
        assert sum(each.num_steps for each in use.steps) == use.num_steps
        assert all(each.mean_s >= 0.005 for each in use.steps if each.kind != "part")
