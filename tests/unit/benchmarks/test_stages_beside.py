"""The table that says which stage differs between live and simulated timelines."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.sim.rigs import LinearSteps, pools, scenario, work

from disagg.bench.workload import Lengths, PrefixPool
from disagg.sim.outcome import Outcome
from disagg.sim.simulate import simulate


def played(**steps: Any) -> Outcome:
    asked = work(25, rate_per_s=6, prompt=Lengths(120, 80, is_lognormal=True), prefixes=PrefixPool())
    return simulate(scenario(pools(1, 1, steps=LinearSteps(**steps)), asked, max_timelines=25), 1)


def test_only_the_stage_that_differs_shows(load_script: Callable[[str], Any]) -> None:
    stages = load_script("stages_beside")
    one, other = played(), played(prompt_token_s=2e-4)
    same = stages.stage_rows(one.timelines, one.timelines)
    assert {row.path for row in same} == {"local", "remote"}
    assert [row for row in same if row.difference] == []
    rows = {(row.path, row.name): row for row in stages.stage_rows(one.timelines, other.timelines)}
    assert rows["remote", "prefill"].difference > 0.01
    assert rows["remote", "later gap"].difference == pytest.approx(0.0, abs=2e-3)
    for path in ("local", "remote"):
        parts = [rows[path, name].difference for name in ("prefill queue", "prefill", "others of ttft")]
        parts += [rows[path, "reservation"].difference] if (path, "reservation") in rows else []
        assert sum(parts) == pytest.approx(rows[path, "ttft"].difference)


def test_steps_by_role_and_kind_of_both_sides(load_script: Callable[[str], Any]) -> None:
    stages = load_script("stages_beside")
    count, seconds = "disagg_steps_total", "disagg_step_seconds_total"
    before = {(count, "decode-0", "decode"): 10.0, (seconds, "decode-0", "decode"): 1.0}
    after = {(count, "decode-0", "decode"): 30.0, (seconds, "decode-0", "decode"): 2.0, (count, "", "decode"): 99.0}
    assert stages.live_steps(before, after) == [("decode", "decode", 20.0, pytest.approx(0.05))]
    outcome = played()
    rows = stages.simulated_steps(outcome.report.workers)
    assert sum(row.num for row in rows) == sum(use.num_steps for use in outcome.report.workers)
    text = "\n".join(stages.lines_of(outcome.timelines, outcome.timelines, rows, rows))
    assert "remote: prefill" in text
    assert "steps simulated, as served: decode" in text
