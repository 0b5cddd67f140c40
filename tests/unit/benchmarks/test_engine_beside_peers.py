"""What the comparison of engines computes, and that an engine that hangs or dies cannot hang it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg.modelfiles.config import ModelConfig

CONFIG = ModelConfig("llama", 100, 8, 16, 2, 2, 1, 4, 4096, 1e-5, 1e4, True, False)


@pytest.fixture
def modules(load_script: Callable[[str], Any]) -> Any:
    class Modules:
        engine: Any = load_script("engine")
        catalog: Any = load_script("peers.catalog")
        fleet: Any = load_script("peers.fleet")
        quality: Any = load_script("peers.quality")
        environments: Any = load_script("peers.environments")

    return Modules


def measured(modules: Any, **rates: float) -> Any:
    """Engines that did one cell at these tokens/s."""
    cell = modules.engine.Cell(0, 512)
    hello = {"weight_bytes": 1000, "kv": "float32"}
    return cell, {
        name.replace("_", "-", 1): modules.engine.Measured(hello, {cell.name: [512 / rate]})
        for name, rate in rates.items()
    }


@pytest.mark.parametrize(
    ("kind", "best"), [("fp32", "transformers-fp32"), ("fp16", "llamacpp-F16"), ("int8", "llamacpp-Q8_0")]
)
def test_an_engine_is_compared_with_the_fastest_that_is_at_least_as_precise(modules: Any, kind: str, best: str) -> None:
    cell, results = measured(modules, transformers_fp32=100, llamacpp_F16=200, llamacpp_Q8_0=300, openvino_bf16=250)
    (ours,) = [entry for entry in modules.catalog.our_entries() if entry.kind == kind]
    entries = [ours, *modules.catalog.PEERS]
    name, rate = modules.engine.best_peer(cell, ours, entries, results)
    assert (name, round(rate)) == (best, round(512 / results[best].seconds[cell.name][0]))


def test_cells_that_miss_a_target_are_named_with_their_roofline(
    modules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, results = measured(modules, disagg_fp16=190, transformers_fp32=100, llamacpp_F16=180, llamacpp_Q8_0=500)
    lone = modules.engine.Cell(1, 256)  # which no peer did
    results["disagg-fp16"].seconds[lone.name] = [1.0]
    entries = [*modules.catalog.our_entries(), *modules.catalog.PEERS]
    shares = {name: [0.4, 0.5] for name in results}
    found = modules.engine.show_targets(entries, [cell, lone], results, shares)
    assert found == {
        "fp16 >= 1 x the fastest as precise, everywhere": {"cells": 1, "short": []},
        "fp16 >= 2 x transformers, everywhere": {
            "cells": 1,
            "short": [{"cell": "prefill 512", "peer": "transformers-fp32", "ratio": 1.9, "share": 0.4}],
        },
    }
    printed = capsys.readouterr().out
    assert "fp16 >= 2 x transformers, everywhere: 0 of 1 cells" in printed
    assert "prefill 512         1.90 x transformers-fp32, at 40 % of its roofline" in printed


def test_a_target_is_of_some_cells(modules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell, results = measured(modules, disagg_int8=120, llamacpp_Q8_0=100)
    entries = [*modules.catalog.our_entries(), *modules.catalog.PEERS]
    found = modules.engine.show_targets(entries, [cell], results, {"disagg-int8": [0.9]})
    wanted = "int8 >= 1.3 x llamacpp-Q8_0, prefill and batch 8 and batch 16"
    assert found[wanted]["short"] == [{"cell": "prefill 512", "peer": "llamacpp-Q8_0", "ratio": 1.2, "share": 0.9}]
    assert found["int8 >= 0.9 x llamacpp-Q8_0, batch 1"] == {"cells": 0, "short": []}
    assert "int8 >= 0.9 x llamacpp-Q8_0, batch 1: not measured" in capsys.readouterr().out


def test_an_unknown_peer_is_refused(modules: Any) -> None:
    with pytest.raises(SystemExit, match="nobody"):
        modules.catalog.chosen_peers("transformers,nobody")


def test_decode_is_bound_by_the_bytes_it_reads_and_prefill_by_arithmetic(modules: Any) -> None:
    engine = modules.engine
    limits = engine.Limits(read_gb_s=1.0, gemm_gflop_s=1.0, bf16_gflop_s=1.0)
    result = engine.Measured({"weight_bytes": 10**9, "kv": "float16"})
    decode = engine.floor_s(engine.Cell(4, 256), CONFIG, result, limits)
    kv_bytes = 4 * 256 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert decode == pytest.approx(engine.DECODE_STEPS[4] * (10**9 + kv_bytes) / 1e9)

    per_layer = 8 * (8 + 2 * 4 + 8) + 3 * 8 * 16
    operations = 2 * (512 * 2 * per_layer + 8 * 100) + 4 * 2 * 8 * 512 * 513 / 2
    light = engine.Measured({"weight_bytes": 1, "kv": "float16"})
    assert engine.floor_s(engine.Cell(0, 512), CONFIG, light, limits) == pytest.approx(operations / 1e9)


def test_equal_scores_agree_and_others_do_not(modules: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((2, 5, 7)).astype(np.float32)
    tokens = [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]
    np.save(tmp_path / "a.npy", scores)
    np.save(tmp_path / "b.npy", -scores)
    same = modules.quality.compare(tmp_path / "a.npy", tmp_path / "a.npy", tokens)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    picked = [logs[piece, place, ids[place + 1]] for piece, ids in enumerate(tokens) for place in range(4)]
    assert same.kl == pytest.approx(0.0, abs=1e-6)
    assert same.top1_agreement == 1.0
    assert same.perplexity == pytest.approx(np.exp(-np.mean(picked)), rel=1e-5)
    other = modules.quality.compare(tmp_path / "b.npy", tmp_path / "a.npy", tokens)
    assert other.kl > 0.1
    assert other.top1_agreement == 0.0


RUNNER = """
import json, os, signal, sys
answers = os.fdopen(int(sys.argv[sys.argv.index("--answers-fd") + 1]), "w")
hello = dict(engine="e", version="1", precision="p", kv="float32", weight_bytes=1, note="")
hello["note"] = str(len(os.sched_getaffinity(0)))
print(json.dumps(hello), file=answers, flush=True)
for line in sys.stdin:
    cell = json.loads(line)["cell"]
    if cell == "hang":
        signal.pause()
    if cell == "die":
        sys.exit("out of luck")
    print(json.dumps({"seconds": 2.5} if cell == "prefill" else {"error": "no such cell"}), file=answers, flush=True)
"""


def command(modules: Any, tmp_path: Path, program: str) -> Any:
    path = tmp_path / "runner.py"
    path.write_text(program)
    return modules.catalog.Command(modules.catalog.PEERS[0], (sys.executable, str(path)))


def test_an_engine_answers_is_pinned_and_ends(modules: Any, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with modules.fleet.running([command(modules, tmp_path, RUNNER)], 1) as (engine,):
        assert engine.hello.note == "1"
        assert engine.ask({"cell": "prefill"}) == 2.5
        with pytest.raises(modules.fleet.CellFailed, match="no such cell"):
            engine.ask({"cell": "decode"})
        assert engine.ask({"cell": "prefill"}) == 2.5
    assert engine._process.returncode == 0
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(("cell", "words"), [("hang", "no answer within"), ("die", "out of luck")])
def test_an_engine_that_hangs_or_dies_costs_one_cell(modules: Any, tmp_path: Path, cell: str, words: str) -> None:
    with modules.fleet.running([command(modules, tmp_path, RUNNER)], 1) as (engine,):
        with pytest.raises(modules.fleet.CellFailed, match=words):
            engine.ask({"cell": cell}, timeout_s=0.5 if cell == "hang" else 30.0)
        with pytest.raises(modules.fleet.CellFailed):
            engine.ask({"cell": "prefill"}, timeout_s=30.0)
    assert engine._process.returncode not in (0, None)


def test_an_engine_that_does_not_start_is_left_out(
    modules: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with modules.fleet.running([command(modules, tmp_path, "raise SystemExit('no such thing')")], 1) as engines:
        assert engines == []
    assert "SKIPPED, it ended with exit code 1: no such thing" in capsys.readouterr().out


def test_an_environment_that_cannot_be_built_says_what_is_missing(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = modules.environments.Environment("x", ("x==1",), needs=("no-such-compiler",))
    with pytest.raises(modules.environments.Unavailable, match=r"x==1 .* needs no-such-compiler"):
        modules.environments.python_of(wanted)
    assert list(tmp_path.rglob("*")) == []


def test_cells_name_their_tokens(modules: Any) -> None:
    cells = modules.engine.all_cells(False)
    assert len(cells) == len({cell.name for cell in cells}) == 11
    assert {cell.name: cell.num_tokens for cell in cells}["decode 8 @ 256"] == 8 * modules.engine.DECODE_STEPS[8]
    assert msgspec.structs.asdict(cells[0]) == {"batch": 0, "context": 128}
