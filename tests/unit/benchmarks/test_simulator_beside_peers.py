"""Other simulators get the rows that ours plays, and what they say comes back; one that cannot be had is left out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Stands in for DistServe's packages: every prompt takes 5 ms, every token after it 2 ms.
FAKE = {
    "simpy.py": (
        "class Environment:\n    def run(self):\n        for request in self.requests:\n            request.play()\n"
    ),
    "simdistserve/__init__.py": "",
    "simdistserve/simulate.py": "",
    "simdistserve/base/__init__.py": "",
    "simdistserve/base/request.py": (
        "class Request:\n"
        "    def __init__(self, env, req_id, prefill_length, output_lens):\n"
        "        self.output_lens, self.log, self.due_ms = output_lens, [], 0.0\n"
        "    def play(self):\n"
        "        after = ((0, 'init'), (5, 'wait_decode'), (5 + 2 * self.output_lens, 'exit_system'))\n"
        "        self.log = [(self.due_ms + ms, event, -1) for ms, event in after]\n"
    ),
    "simdistserve/base/scheduler.py": (
        "from itertools import accumulate\n"
        "def put_requests_with_interarrivals(env, scheduler, gaps, requests):\n"
        "    env.requests = requests\n"
        "    for request, due_ms in zip(requests, accumulate(gaps)):\n"
        "        request.due_ms = due_ms\n"
    ),
    "simdistserve/base/worker.py": "WorkerConfig = dict\n",
    "simdistserve/clusters/__init__.py": "",
    "simdistserve/clusters/disagg.py": (
        "class DisaggCluster:\n"
        "    scheduler = None\n"
        "    def __init__(self, **words):\n"
        "        assert words['N_prefill_instance'] == 40 and words['N_decode_instance'] == 60, words\n"
        "    def run(self): ...\n"
    ),
    "simdistserve/constants.py": "class ModelTypes:\n    opt_13b = 'OPT-13B'\n",
    "simdistserve/estimators/__init__.py": "",
    "simdistserve/estimators/memory_estimator.py": "def get_max_num_tokens(model, tp, pp):\n    return 66144\n",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{100 + second},{5 + second}" for second in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


@pytest.fixture
def modules(load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    class Modules:
        simulator: Any = load_script("simulator")
        simulators: Any = load_script("peers.simulators")

    monkeypatch.setattr(Modules.simulators, "python_of", lambda environment: Path(sys.executable))
    return Modules


def run(modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON line, and all that was printed under "text"."""
    monkeypatch.setattr(sys, "argv", ["simulator.py", *words])
    assert modules.simulator.main() == 0
    text = capsys.readouterr().out
    return json.loads(text.splitlines()[-1]) | {"text": text}


def test_alone_it_says_how_fast_it_was(
    modules: Any, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = run(modules, monkeypatch, capsys, str(trace), "--format", "azure", "--requests", "30")
    assert (line["num_requests"], line["num_workers"]) == (30, 100)
    assert line["requests_per_cpu_s"] > 0


def test_another_simulator_plays_the_same_rows(
    modules: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = (str(trace), "--format", "azure", "--requests", "20", "--distserve", str(tmp_path))
    line = run(modules, monkeypatch, capsys, *words)
    ours, theirs = line["sides"]
    assert (ours["name"], theirs["name"]) == ("disagg", "DistServe's")
    assert theirs["ttft_p50_s"] == pytest.approx(0.005)
    assert theirs["tpot_p90_s"] == pytest.approx(0.002)
    assert line["ratio"] > 0
    assert not line["skipped"]


@pytest.mark.parametrize("flag", ["--distserve", "--vidur"])
def test_a_simulator_that_cannot_be_had_is_left_out_with_the_reason(
    modules: Any,
    trace: Path,
    tmp_path: Path,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = run(
        modules, monkeypatch, capsys, str(trace), "--format", "azure", "--requests", "20", flag, str(tmp_path / "no")
    )
    assert [side["name"] for side in line["sides"]] == ["disagg"]
    assert line["ratio"] is None
    assert "is no checkout of it" in line["skipped"]
    assert "is left out" in line["text"]


def test_a_simulator_that_breaks_is_left_out_with_its_last_words(
    modules: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vidur").mkdir()
    (tmp_path / "vidur" / "simulator.py").write_text("")
    words = (str(trace), "--format", "azure", "--requests", "20", "--vidur", str(tmp_path))
    line = run(modules, monkeypatch, capsys, *words)
    assert "vidur" in line["skipped"]
    assert "Error" in line["skipped"]
