"""`disagg advise`, `plan`, `simulate`: what they print, and what is said of bad input."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from disagg.cli.main import app
from disagg.core.errors import ConfigurationError
from disagg.planner.scenario_file import read_scenario_file, scenario_of, target_of, traffic_of
from disagg.policy.step_time import StepCosts
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.serving import Contention, Serving

ROOT = Path(__file__).parents[3]
TRACES = Path(os.environ.get("DISAGG_SHARED", ROOT.parent / "shared")) / "traces"
EXAMPLES = sorted((ROOT / "examples" / "planner").glob("*.toml"))
DRAWN = ("--rate", "2", "--prompt-tokens", "500", "--output-tokens", "10")
QUICK = ("--requests", "60", "--limit-s", "0")

SCENARIO = """
model = "Llama-3.1-8B"
[traffic]
rate_per_s = 5.0
num_requests = 40
prompt = { mean = 500.0 }
output = { mean = 10.0 }
[[pool]]
role = "prefill"
count = 1
device = "h100"
[[pool]]
role = "decode"
count = 1
device = "a100"
"""


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refusal(*words: str | Path) -> str:
    """What `disagg` would print in its one line."""
    result = run(*words)
    assert isinstance(result.exception, ConfigurationError), result.output + repr(result.exception)
    return str(result.exception)


def scenario(tmp_path: Path, text: str = SCENARIO) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return path


def test_simulate_prints_a_table_and_writes_json_and_a_page(tmp_path: Path) -> None:
    page, values = tmp_path / "out.html", tmp_path / "out.json"
    result = run("simulate", scenario(tmp_path), "--html", page, "--json", values)
    assert result.exit_code == 0, result.output
    assert "attainment" in result.output
    assert "40 remote" in result.output
    report = json.loads(values.read_text())["report"]
    assert report["num_finished"] == 40
    text = page.read_text()
    assert text.count("<svg") == 6
    assert "<script" not in text
    assert "src=" not in text


HERE = """
model = "tiny"
local_prefill_tokens = 64
[traffic]
rate_per_s = 2.0
num_requests = 20
prompt = { mean = 100.0 }
output = { mean = 5.0 }
[[here]]
role = "prefill"
count = 1
profile = "profile.json"
[[here]]
role = "decode"
count = 1
profile = "PROFILE"
"""


def profile_here(path: Path, request_s: float) -> None:
    costs = StepCosts(0.02, 1e-3, 0.0, 1e-3, 0.0)
    serving = Serving(costs, request_s, 0.001, Contention(1.5, 1.5, 1.5, 1.5))
    path.write_bytes(Profile("tiny", "here", "fp32", "float32", 4, 1024, 8192, costs, serving=serving).encode())


def test_workers_of_a_profiled_machine_are_simulated_as_they_were_served(tmp_path: Path) -> None:
    profile_here(tmp_path / "profile.json", 0.25)
    path, values = scenario(tmp_path, HERE.replace("PROFILE", "profile.json")), tmp_path / "out.json"
    result = run("simulate", path, "--json", values)
    assert result.exit_code == 0, result.output
    assert "20 remote" in result.output
    assert json.loads(values.read_text())["report"]["ttft_s"]["p50"] > 0.25 + 0.02 + 0.1
    workers = scenario_of(read_scenario_file(path)).workers
    assert [(spec.name, spec.machine) for spec in workers] == [("prefill-0", "here"), ("decode-0", "here")]
    assert scenario_of(read_scenario_file(path)).contention.streams_beside_prompts == 1.5


def test_profiles_of_two_machines_are_not_one_machine(tmp_path: Path) -> None:
    profile_here(tmp_path / "profile.json", 0.25)
    profile_here(tmp_path / "other.json", 0.5)
    assert "profiles of 2 machines" in refusal("simulate", scenario(tmp_path, HERE.replace("PROFILE", "other.json")))


def test_no_chance_of_a_process_gets_into_an_outcome(tmp_path: Path) -> None:
    dies = '[[dies]]\nat_s = 2.0\nworker = "decode-1"\nrestart_after_s = 1.0\n'
    path, outputs = scenario(tmp_path, SCENARIO.replace("count = 1", "count = 3") + dies), set()
    for chance in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": chance}
        words = (sys.executable, "-m", "disagg", "simulate", str(path), "--json", str(tmp_path / f"{chance}.json"))
        outputs.add(subprocess.run(words, env=environment, check=True, capture_output=True, timeout=120).stdout)
    assert len(outputs) == 1
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


def test_a_scenario_in_which_nothing_can_be_served_is_shown_as_well(tmp_path: Path) -> None:
    text = SCENARIO.replace("num_requests = 40", "num_requests = 1").replace("mean = 500.0", "mean = 900000.0")
    page = tmp_path / "out.html"
    result = run("simulate", scenario(tmp_path, text), "--html", page)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "1 turned away" in result.output
    assert "nothing to show" in page.read_text()


def test_simulate_obeys_the_seed(tmp_path: Path) -> None:
    path = scenario(tmp_path)
    one, again, other = (run("simulate", path, "--seed", seed).output for seed in ("1", "1", "2"))
    assert one == again != other


def test_advise_names_the_rule_of_thumb_beside_the_simulation() -> None:
    result = run("advise", "Llama-3.1-8B", "--gpu", "h100=2", *DRAWN, *QUICK)
    assert result.exit_code == 0, result.output
    assert "rule of thumb (below 100 requests/s or 512 tokens: don't): don't" in result.output
    assert "the simulation: don't" in result.output
    assert "2 x H100-SXM at 4.76 $/h (as of 2023-12-01)" in result.output
    assert "break-even rate" in result.output
    assert "break-even prompt" in result.output
    assert "THE TIME LIMIT ENDED THE SEARCH" in result.output


def test_plan_prints_front_ratio_headroom_and_a_command(tmp_path: Path) -> None:
    values = tmp_path / "plan.json"
    result = run("plan", "Llama-3.1-8B", "--gpu", "h100=3", *DRAWN, *QUICK, "--json", values)
    assert result.exit_code == 0, result.output
    parts = (
        "P:D ratio",
        "split over mixed",
        "on equal hardware",
        "120% of the load",
        "worker (H100-SXM TP1) less",
        ">*",
    )
    for part in (*parts, "disagg router --model Llama-3.1-8B=Llama-3.1-8B", "disagg worker Llama-3.1-8B"):
        assert part in result.output, part
    assert json.loads(values.read_text())["searched"]["is_cut_short"]


def test_plan_takes_a_budget_and_a_scenario(tmp_path: Path) -> None:
    words = ("--gpu", "h100@4", "--gpu", "a100@2", "--budget", "8.5", "--objective", "per-dollar", *QUICK)
    result = run("plan", scenario(tmp_path), *words)
    assert result.exit_code == 0, result.output
    assert "at most 8.5 $/h" in result.output
    assert "2 x H100-SXM at 4 $/h, 4 x A100-SXM-80G at 2 $/h" in result.output


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_said_in_gigabytes() -> None:
    for command in ("advise", "plan"):
        words = refusal(command, "Llama-3.1-70B", "--gpu", "h100=1", *DRAWN)
        assert "GB too much" in words


def test_a_scenario_whose_model_does_not_fit_is_said_in_gigabytes(tmp_path: Path) -> None:
    path = scenario(tmp_path, SCENARIO.replace("8B", "70B"))
    assert "GB too much" in refusal("simulate", path)


def test_a_bad_row_of_a_trace_is_said_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,10\n2023-11-16 18:15:47.68,many,10\n"
    )
    words = refusal("advise", "Llama-3.1-8B", "--gpu", "h100=1", "--trace", path, "--trace-format", "azure")
    assert "trace.csv, line 3" in words
    assert "'many'" in words


def test_targets_that_nobody_can_meet_name_the_floor() -> None:
    asked = ("plan", "Llama-3.1-70B", "--gpu", "h100=8", *DRAWN)
    assert "s of prefill" in refusal(*asked, "--ttft-s", "0.01")
    assert "reading the weights" in refusal(*asked, "--tpot-s", "0.002")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("Llama-3.1-8B", *DRAWN), "no devices"),
        (("Llama-3.1-8B", "--gpu", "h100=many", *DRAWN), "write NAME=COUNT"),
        (("Llama-3.1-8B", "--gpu", "h100=0", *DRAWN), "1 or more"),
        (("Llama-3.1-8B", "--gpu", "h100", *DRAWN), "give a count"),
        (("Llama-3.1-8B", "--gpu", "h100=2", "--gpu", "H100-SXM=2", *DRAWN), "each device once"),
        (("Llama-3.1-8B", "--gpu", "abacus=2", *DRAWN), "not in the catalogue"),
        (("Llama-9", "--gpu", "h100=2", *DRAWN), "not in the catalogue"),
        (("missing/config.json", "--gpu", "h100=2", *DRAWN), "no such file"),
        (("Llama-3.1-8B", "--gpu", "h100=2"), "give all three"),
        (("Llama-3.1-8B", "--gpu", "h100=2", "--trace", "missing.csv", "--trace-format", "azure"), "no trace file"),
        (("Llama-3.1-8B", "--gpu", "h100=2", "--trace", "missing.csv"), "give --trace-format, one of mooncake"),
        (("Llama-3.1-8B", "--gpu", "h100=2", "--trace", "missing.csv", "--trace-format", "x"), "is not one of"),
        (("Llama-3.1-8B", "--gpu", "h100@2", "--budget", "1.5", *DRAWN), "1.5 dollars an hour buy none at 2 each"),
        (
            ("Llama-3.1-8B", "--gpu", "h100=2", "--rate", "1", "--prompt-tokens", "200000", "--output-tokens", "9"),
            "the context of Llama-3.1-8B is 131072",
        ),
        (("Llama-3.1-8B", "--gpu", "h100=2", *DRAWN, "--share", "1.5"), "between 0 and 1"),
        (("Llama-3.1-8B", "--gpu", "h100=2", *DRAWN, "--link", "string"), "link 'string'"),
        (("missing.toml", "--gpu", "h100=2"), "missing.toml"),
    ],
)
def test_what_cannot_be_is_refused_in_plain_words(words: tuple[str, ...], part: str) -> None:
    assert part in refusal("advise", *words)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("rate_per_s = 5.0", "", "needs a trace and its format, or rate_per_s"),
        ("rate_per_s = 5.0", "rate = 5.0", "unknown field `rate`"),
        ('role = "decode"', 'role = "writer"', "Invalid enum value 'writer'"),
        ('model = "Llama-3.1-8B"', "model = ", "Invalid value"),
        ("count = 1", "count = 0", "1 or more"),
        ('role = "decode"', 'role = "prefill"', "all of its workers are prefill; give it mixed ones"),
        (SCENARIO[SCENARIO.index("[[pool]]") :], "", "no workers: give a [[pool]]"),
        ("mean = 10.0", "mean = 0.0", "small.toml: lengths of mean 0"),
    ],
)
def test_a_scenario_that_is_wrong_says_where(tmp_path: Path, old: str, new: str, part: str) -> None:
    assert part in refusal("simulate", scenario(tmp_path, SCENARIO.replace(old, new)))


def test_an_answer_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert "cannot be written" in refusal("simulate", scenario(tmp_path), "--json", tmp_path / "no" / "out.json")


def test_sessions_are_simulated_but_not_planned(tmp_path: Path) -> None:
    path = scenario(tmp_path, SCENARIO.replace("num_requests = 40", "num_requests = 5\nturns = { mean = 3.0 }"))
    result = run("simulate", path)
    assert result.exit_code == 0, result.output
    assert "sessions can be simulated" in refusal("plan", path)


# --- examples and traces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read(path: Path) -> None:
    file = read_scenario_file(path)
    assert scenario_of(file).workers
    assert traffic_of(file).rate_per_s > 0
    assert 0 < target_of(file).share < 1


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


PUBLIC = {
    "azure2023/AzureLLMInferenceTrace_code.csv": ("azure", "advice: mixed\n"),
    "azure2023/AzureLLMInferenceTrace_conv.csv": ("azure", "advice: mixed\n"),
    "mooncake/conversation_trace.jsonl": ("mooncake", "but the fleet is too small"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_advice_on_public_traces(name: str) -> None:
    """Within two minutes of computing: 16 GPUs are plenty for both Azure traces and too few for the other."""
    trace, (kind, said) = TRACES / name, PUBLIC[name]
    if not trace.is_file():
        pytest.skip(f"{trace} is not here")
    begin_s = time.process_time()
    words = ("--trace", trace, "--trace-format", kind, "--requests", "250")
    result = run("advise", "Llama-3.1-70B", "--gpu", "h100=16", *words)
    assert result.exit_code == 0, result.output
    assert time.process_time() - begin_s < 120
    assert trace.name in result.output
    assert said in result.output
    assert "THE TIME LIMIT" not in result.output
    for part in ("break-even rate", "break-even prompt", "rule of thumb", "gain of the split on equal hardware"):
        assert part in result.output
