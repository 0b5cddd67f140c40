"""The page of a simulation: what it counts is what the report counts, and a browser draws it."""

import subprocess
from pathlib import Path

import pytest
from tests.unit.report.test_in_a_browser import CHROMIUM, pixels
from tests.unit.sim.rigs import pools, scenario, work

from disagg.planner.estimate import Target
from disagg.planner.outcome_page import by_time, outcome_page
from disagg.sim.outcome import Outcome
from disagg.sim.scenario import Fidelity, Slo
from disagg.sim.simulate import simulate

SLO = Slo(0.06, 0.01)


@pytest.fixture(scope="module")
def crowded() -> Outcome:
    """Some are within the targets, some are late, some are turned away."""
    return simulate(scenario(pools(1, 1), work(80, rate_per_s=40), Fidelity.LARGE, slo=SLO, max_open_requests=8), 2)


def test_requests_by_time_are_those_of_the_report(crowded: Outcome) -> None:
    report = crowded.report
    assert 0 < report.attainment < 1
    assert report.num_turned_away > 0
    span_s, asked, met = by_time(crowded.records, SLO)
    assert sum(asked) == report.num_requests
    assert sum(met) == round(report.attainment * report.num_requests)
    assert all(within <= came for within, came in zip(met, asked, strict=True))
    arrived_s = crowded.records.columns["arrived_s"]
    assert span_s * len(asked) == pytest.approx(max(arrived_s) - min(arrived_s))
    assert asked[0] > 0
    assert asked[-1] > 0


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian package chromium)")
def test_a_browser_draws_it(tmp_path: Path, crowded: Outcome) -> None:
    assert CHROMIUM is not None
    source, picture = tmp_path / "page.html", tmp_path / "page.png"
    source.write_text(outcome_page("crowded", "by hand", crowded, Target(SLO)))
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=600,1200"),
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", source.as_uri()),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    seen = pixels(picture)
    assert len(seen) == 2 * 1200
    assert len(set(seen)) > 6, "no plot is drawn"
