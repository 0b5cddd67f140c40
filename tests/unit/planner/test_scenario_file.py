"""Scenario files: several models, measured steps, workers that come late; and what can be simulated only."""

from pathlib import Path

import pytest

from disagg.core.errors import ConfigurationError
from disagg.planner.scenario_file import check_plannable, read_scenario_file, scenario_of, target_of
from disagg.sim.hardware.measured import MeasuredTable
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.scenario import Scenario
from disagg.sim.simulate import simulate

HEAD = """
model = "Llama-3.1-8B"
[traffic]
rate_per_s = 5.0
num_requests = 40
prompt = { mean = 500.0 }
output = { mean = 10.0 }
"""
PREFILL = '[[pool]]\nrole = "prefill"\ncount = 1\ndevice = "h100"\n'
DECODE = '[[pool]]\nrole = "decode"\ncount = 1\ndevice = "a100"\n'
OTHER = '[[pool]]\nrole = "mixed"\ncount = 1\ndevice = "h100"\nmodel = "Qwen3-8B"\n'


def scenario(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return scenario_of(read_scenario_file(path))


def test_pools_of_two_models_share_the_traffic(tmp_path: Path) -> None:
    made = scenario(tmp_path, HEAD + PREFILL + DECODE + OTHER)
    assert made.models == ("Llama-3.1-8B", "Qwen3-8B")
    layers = {spec.model: spec.steps.num_layers for spec in made.workers}
    assert layers == {"Llama-3.1-8B": 32, "Qwen3-8B": 36}
    report = simulate(made).report
    assert report.num_finished == 40
    counts = {each.path: each.num_requests for each in report.paths}
    assert set(counts) == {"remote", "mixed"}
    assert min(counts.values()) > 10


def test_a_model_that_nobody_serves_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nobody can serve 'Qwen3-8B'"):
        scenario(tmp_path, HEAD + PREFILL + DECODE + OTHER.replace("mixed", "decode"))


def test_a_trace_asks_for_one_model(tmp_path: Path) -> None:
    head = HEAD.replace("rate_per_s = 5.0", 'trace = "trace.csv"\nformat = "azure"')
    with pytest.raises(ConfigurationError, match=r"ask for one model, its pools have Llama-3\.1-8B, Qwen3-8B"):
        scenario(tmp_path, head + PREFILL + DECODE + OTHER)


def test_steps_are_those_of_the_pools_table(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("seconds,prompt_tokens,num_streams,context\n0.1,100,,\n0.6,600,,\n")
    made = scenario(tmp_path, HEAD + PREFILL + 'table = "steps.csv"\n' + DECODE)
    prefill, decode = (spec.steps for spec in made.workers)
    assert isinstance(prefill, MeasuredTable)
    assert not isinstance(decode, MeasuredTable)
    assert prefill.step_s(StepShape(((350, 0),))) == pytest.approx(0.35)
    assert made.workers[0].blocks() > 1000  # what the device has beside the weights
    report = simulate(made).report
    assert report.num_finished == 40
    assert report.ttft_s.p50 > 0.5


def test_a_bad_row_of_a_table_is_said_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("seconds,prompt_tokens\n0.1,100\nsoon,200\n")
    with pytest.raises(ConfigurationError, match=r"line 3 of .*steps\.csv is not a measured step"):
        scenario(tmp_path, HEAD + PREFILL + 'table = "steps.csv"\n' + DECODE)


def test_workers_may_come_late(tmp_path: Path) -> None:
    late = PREFILL + "ready_after_s = 1.0\n"
    crowded = HEAD.replace("rate_per_s = 5.0", "rate_per_s = 10.0").replace("500.0", "6000.0")
    few, more = (scenario(tmp_path, crowded + text + DECODE) for text in (PREFILL, PREFILL + late))
    assert [spec.ready_after_s for spec in more.workers] == [0.0, 1.0, 0.0]
    assert simulate(more).report.ttft_s.mean < simulate(few).report.ttft_s.mean


def test_a_narrow_wire_is_narrow_on_lines_between_sites_as_well(tmp_path: Path) -> None:
    text = HEAD + PREFILL + 'site = "far"\n' + DECODE + 'site = "near"\n'
    text += '[[line]]\nsource = "far"\ntarget = "near"\nlink = "WAN-metro"\n'
    native, narrow = (scenario(tmp_path, head + text) for head in ("", 'kv_wire = "int8"\n'))
    gain = narrow.lines[0].link.bandwidth_bytes_s / native.lines[0].link.bandwidth_bytes_s
    assert 1.8 < gain < 2.0
    assert gain == pytest.approx(narrow.workers[0].nic.bandwidth_bytes_s / native.workers[0].nic.bandwidth_bytes_s)
    gaps_s = [simulate(made).report.first_gap_s.mean for made in (native, narrow)]
    assert gaps_s[1] < 0.7 * gaps_s[0]


def test_a_line_to_nowhere_is_refused(tmp_path: Path) -> None:
    line = '[[line]]\nsource = "far"\ntarget = "nere"\nlink = "WAN-metro"\n'
    pools = PREFILL + 'site = "far"\n' + DECODE + 'site = "near"\n'
    with pytest.raises(ConfigurationError, match="joins site 'nere', where no worker is; they are at 'far', 'near'"):
        scenario(tmp_path, HEAD + pools + line)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (PREFILL + DECODE + OTHER, "several models"),
        (PREFILL + 'table = "steps.csv"\n' + DECODE, "steps of a table"),
        ('[[here]]\nrole = "mixed"\ncount = 1\nprofile = "p.json"\n', "workers on this machine"),
    ],
)
def test_what_can_only_be_simulated_is_not_planned_for(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "small.toml"
    path.write_text(HEAD + text)
    with pytest.raises(ConfigurationError, match=f"small: {part} can be simulated; advise and plan cannot"):
        check_plannable(read_scenario_file(path))


def test_targets_that_are_none_are_refused_whoever_asks(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(HEAD + "[slo]\nshare = 90.0\n" + PREFILL + DECODE)
    with pytest.raises(ConfigurationError, match=r"share of 90: .* between 0 and 1"):
        target_of(read_scenario_file(path))
