"""Flags of `disagg advise` and `plan` over a scenario: what is given counts, what is not is as the scenario says."""

from pathlib import Path

import pytest

from disagg.cli.planner_flags import QuestionFlags
from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.precision import Precision

SCENARIO = """
model = "Llama-3.1-8B"
link = "IB-HDR"
engine = "trtllm"
kv = "fp8"
seed = 7
[slo]
ttft_s = 3.0
[traffic]
rate_per_s = 5.0
prompt = { mean = 500.0, spread = 100.0 }
output = { mean = 10.0 }
[[pool]]
role = "mixed"
count = 2
device = "h100"
"""


def scenario(tmp_path: Path, text: str = SCENARIO) -> str:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return str(path)


def traced(tmp_path: Path) -> str:
    rows = "\n".join(f"{at_s},100,5" for at_s in range(11))
    (tmp_path / "trace.csv").write_text(f"Timestamp,Request tokens,Response tokens\n{rows}\n")
    begin, _, rest = SCENARIO.partition("rate_per_s")
    pools = rest[rest.index("[[pool]]") :]
    return scenario(tmp_path, f'{begin}trace = "trace.csv"\nformat = "burstgpt"\nrate_scale = 3.0\n{pools}')


def test_what_is_not_given_is_as_the_scenario_says(tmp_path: Path) -> None:
    asked = QuestionFlags(subject=scenario(tmp_path)).question()
    assert (asked.fleet.link, asked.fleet.engine) == ("IB-HDR", "trtllm")
    assert (asked.fleet.weights, asked.fleet.kv) == (Precision.BF16, Precision.FP8)
    assert (asked.seed, asked.fleet.num_gpus, asked.target.slo.ttft_s) == (7, 2, 3.0)
    assert asked.traffic.rate_per_s == pytest.approx(5.0, rel=0.1)
    assert asked.model == "Llama-3.1-8B"


def test_what_is_given_counts(tmp_path: Path) -> None:
    flags = QuestionFlags(
        subject=scenario(tmp_path),
        gpu=["a100=4"],
        link="TCP-10G",
        engine="vllm",
        weights=Precision.FP8,
        kv=Precision.BF16,
        seed=0,
        ttft_s=1.0,
        rate=2.0,
        prompt_tokens=50.0,
        output_tokens=5.0,
    )
    asked = flags.question()
    assert (asked.fleet.link, asked.fleet.engine) == ("TCP-10G", "vllm")
    assert (asked.fleet.weights, asked.fleet.kv) == (Precision.FP8, Precision.BF16)
    assert [(each.device, each.count) for each in asked.fleet.gpus] == [("A100-SXM-80G", 4)]
    assert (asked.seed, asked.target.slo.ttft_s, asked.traffic.rate_per_s) == (0, 1.0, 2.0)


def test_another_seed_draws_other_traffic(tmp_path: Path) -> None:
    one, again, other = (QuestionFlags(subject=scenario(tmp_path), seed=seed).question() for seed in (1, 1, 2))
    assert one.traffic == again.traffic
    assert one.traffic.requests != other.traffic.requests


def test_a_scale_replaces_that_of_the_scenarios_trace(tmp_path: Path) -> None:
    path = traced(tmp_path)
    assert QuestionFlags(subject=path).question().traffic.rate_per_s == pytest.approx(3.0)
    assert QuestionFlags(subject=path, rate_scale=2.0).question().traffic.rate_per_s == pytest.approx(2.0)


def test_a_model_is_found_from_where_we_are(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config = '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
    config += '"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096}'
    (tmp_path / "weights" / "config.json").write_text(config)
    asked = QuestionFlags(subject=scenario(tmp_path, SCENARIO.replace("Llama-3.1-8B", "weights"))).question()
    assert asked.model == str(tmp_path / "weights")
    assert asked.fleet.model.num_layers == 2


def test_what_would_be_passed_over_in_silence_is_refused(tmp_path: Path) -> None:
    path = scenario(tmp_path)
    trace = tmp_path / "t.csv"
    for flags, part in (
        (QuestionFlags(subject=path, rate_scale=2.0), "small has no trace"),
        (QuestionFlags(subject=path, prompt_tokens=900.0), "give all three"),
        (QuestionFlags(subject=path, trace=trace, trace_format="azure", rate=2.0), "leave out --rate"),
        (QuestionFlags(subject=path, share=1.0), "between 0 and 1"),
        (QuestionFlags(subject=path, ttft_s=float("inf")), "times must be above 0"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            flags.question()
