"""The lines that a plan says start it: the command line takes them, and workers get the limits of the plan."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.planner import rigs
from typer.testing import CliRunner

from disagg.cli import launch
from disagg.cli.main import app
from disagg.core.formats import KvDtype, KvWire, Weights
from disagg.core.roles import Numerics, Role
from disagg.planner.candidate import Candidate, PoolPlan, worker_specs
from disagg.planner.fleet import Cut, Steps
from disagg.planner.start_command import start_command
from disagg.router.config import RouterConfig
from disagg.sim.hardware.precision import Precision
from disagg.worker.config import WorkerConfig

CUT = Cut("H100-SXM", 1)
SPLIT = (PoolPlan(Role.PREFILL, 1, CUT, 2048), PoolPlan(Role.DECODE, 2, CUT, 8192, max_running=77))


class Started:
    """What the lines would have run."""

    def __init__(self) -> None:
        self.routers: list[RouterConfig] = []
        self.workers: list[WorkerConfig] = []

    def run(self, lines: list[str]) -> None:
        for line in lines:
            if not line.startswith("("):
                words = shlex.split(line, comments=True)
                assert words[0] == "disagg"
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    seen = Started()

    def run_router(config: RouterConfig) -> int:
        seen.routers.append(config)
        return 0

    def run_worker(config: WorkerConfig) -> int:
        seen.workers.append(config)
        return 0

    def find_model(name_or_path: str, report: Callable[[str], None]) -> Path:
        return Path("/models") / name_or_path

    monkeypatch.setattr(launch, "run_router", run_router)
    monkeypatch.setattr(launch, "run_worker", run_worker)
    monkeypatch.setattr(launch, "find_model", find_model)
    return seen


def test_workers_start_with_the_limits_that_were_simulated(started: Started) -> None:
    steps, candidate = Steps(rigs.fleet()), Candidate(SPLIT, 512, KvWire.INT8)
    started.run(start_command(candidate, steps, "some/model"))
    (router,) = started.routers
    assert router.models == (("model", "/models/some/model"),)
    assert router.local_prefill_tokens == 512
    specs = worker_specs(candidate, steps, 4096)
    assert [worker.worker_id for worker in started.workers] == [spec.name for spec in specs]
    for worker, spec in zip(started.workers, specs, strict=True):
        assert (worker.role, worker.served_name) == (spec.role, "model")
        assert (worker.num_blocks, worker.block_size) == (spec.num_blocks, spec.block_size)
        assert (worker.chunk_tokens, worker.mixed_chunk_tokens) == (spec.chunk_tokens, spec.mixed_chunk_tokens)
        assert (worker.max_running, worker.itl_target_s) == (spec.max_running, spec.itl_target_s)
        assert (worker.weights, worker.kv_dtype) == (Weights.FP16, KvDtype.FLOAT16)
    assert [worker.device for worker in started.workers] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(("wire", "numerics"), [(KvWire.NATIVE, Numerics.EXACT), (KvWire.INT8, Numerics.BOUNDED)])
def test_a_wire_that_loses_bits_is_not_asked_of_exact_workers(
    started: Started, wire: KvWire, numerics: Numerics
) -> None:
    started.run(start_command(Candidate(SPLIT, 0, wire), Steps(rigs.fleet()), "some/model"))
    assert {(worker.kv_wire, worker.numerics) for worker in started.workers} == {(wire, numerics)}


@pytest.mark.parametrize("given", ["some/model", "some/model/", "some/model/config.json"])
def test_the_folder_of_the_weights_is_named_whatever_was_given(started: Started, given: str) -> None:
    started.run(start_command(Candidate(SPLIT), Steps(rigs.fleet()), given))
    assert started.routers[0].models == (("model", "/models/some/model"),)
    assert {(worker.model, worker.served_name) for worker in started.workers} == {("/models/some/model", "model")}


def test_what_the_lines_cannot_say_is_noted(tmp_path: Path, started: Started) -> None:
    assert not any(line.startswith("(") for line in start_command(Candidate(SPLIT), Steps(rigs.fleet()), str(tmp_path)))
    wide = (PoolPlan(Role.MIXED, 5, Cut("H100-SXM", 2), 2048),)
    steps = Steps(rigs.fleet(10, weights=Precision.FP8, kv=Precision.FP8))
    lines = start_command(Candidate(wide), steps, "Llama-3.1-8B")
    notes = "\n".join(line for line in lines if line.startswith("("))
    assert "Llama-3.1-8B stands for the folder of its weights" in notes
    assert "runs on one device" in notes
    assert "10 devices are more than the 8 of a node" in notes
    assert "fp8 weights and fp8 KV, which workers of this project do not have" in notes
    started.run(lines)
    assert [worker.device for worker in started.workers] == ["cuda:0", "cuda:2", "cuda:4", "cuda:6", "cuda:0"]
    assert {worker.num_blocks for worker in started.workers} == {None}  # no room of two devices, nor of narrower KV
