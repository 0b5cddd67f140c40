"""`disagg bench phases` over a server that is not there: what is asked of it, and which round is shown."""

from typing import Any, Self

import msgspec
import pytest
from tests.unit.bench.rigs import record, result

from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, LoadResult, Target
from disagg.bench.workload import ClosedWork
from disagg.cli import bench_phases
from disagg.cli.bench_options import PhasesOptions
from disagg.cli.bench_phases import run_phases
from disagg.core.formats import Weights
from disagg.sim.hardware.model_shape import ModelShape

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
ASKED = PhasesOptions(
    target="m", concurrent=2, prompt_tokens=10, output_tokens=11, measure_limits=False, weights=Weights.FP16
)


class Server:
    """Each round takes longer than the one before; the first one warms up."""

    def __init__(self) -> None:
        self.loads: list[tuple[Target, LoadPlan]] = []
        self.arguments: tuple[str, ...] = ()
        self.url = "http://served"

    def serve(self, arguments: tuple[str, ...], *, ready_timeout_s: float) -> Self:
        self.arguments = arguments
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""

    def measure(self, target: Target, plan: LoadPlan) -> LoadResult:
        self.loads.append((target, plan))
        times = len(self.loads)
        records = [
            record(n, ttft_s * times, 0.1 * times, 11, due_s=0.0, prompt=10) for n, ttft_s in ((0, 0.5), (1, 1.0))
        ]
        return result("", records)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(bench_phases, "Serve", made.serve)
    monkeypatch.setattr(bench_phases, "measure", made.measure)
    monkeypatch.setattr(bench_phases, "plain_ids", lambda model: (1, 2, 3))
    monkeypatch.setattr(bench_phases, "shape_of", lambda asked: ModelShape.from_config(CONFIG, "m"))
    return made


def test_all_are_asked_at_once_and_the_round_in_the_middle_is_shown(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    run_phases(ASKED, as_json=True)
    said: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    prefill, decode = said["phases"]
    assert len(said["rounds"]) == 3
    assert prefill["seconds"] == pytest.approx(3 * 1.0 - 0.001)  # rounds of 2, 3 and 4 times the first
    assert decode["seconds"] == pytest.approx(3 * 0.5)
    assert (prefill["num_tokens"], said["limits"]) == (20, None)
    assert server.arguments[:1] == ("m",)
    assert server.arguments[-4:] == ("--local-prefill-tokens", "0", "--weights", "fp16")
    for target, plan in server.loads:
        assert (target.api, target.ids) == (Api.IDS, (1, 2, 3))
        assert isinstance(plan.workload, ClosedWork)
        assert (plan.workload.num_clients, plan.workload.work.num_requests) == (2, 2)
    assert len({plan.prompt_seed for _, plan in server.loads}) == 4  # no round finds another's prefixes


def test_people_are_shown_a_table(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_phases(ASKED, as_json=False)
    first, heads, prefill, decode = capsys.readouterr().out.splitlines()
    assert first == "2 at once, 10 tokens in, 11 out"
    assert heads.split() == ["seconds", "tokens/s", "GFLOP/s", "GB/s", "read", "FLOP/byte"]
    assert prefill.split()[:3] == ["prefill", "3.00", "7"]
    assert decode.split()[:2] == ["decode", "1.50"]
