"""Flags become configurations and back; what cannot work is one plain line and exit code 2."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import disagg
from disagg.cli import launch
from disagg.cli.main import app, main
from disagg.cluster.command_line import router_arguments, router_environment, worker_arguments
from disagg.cluster.plan import LocalPlan
from disagg.core.endpoints import TransportChoice
from disagg.core.errors import ConfigurationError
from disagg.core.formats import Kernels, KvDtype, KvWire, Weights
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role
from disagg.router.config import RouterConfig
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.worker.config import WorkerConfig


class Launched:
    """What the commands would have run."""

    def __init__(self) -> None:
        self.workers: list[WorkerConfig] = []
        self.routers: list[RouterConfig] = []
        self.plans: list[LocalPlan] = []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    seen = Launched()

    def run_worker(config: WorkerConfig) -> int:
        seen.workers.append(config)
        return 0

    def run_router(config: RouterConfig) -> int:
        seen.routers.append(config)
        return 0

    def run_serve(plan: LocalPlan, *, start_timeout_s: float, stop_timeout_s: float) -> int:
        seen.plans.append(plan)
        return 0

    def find_model(name_or_path: str, report: Callable[[str], None]) -> Path:
        if name_or_path == "/bad":
            raise ConfigurationError("'/bad' is not a model")
        return Path("/models") / name_or_path.lstrip("/")

    monkeypatch.setattr(launch, "run_worker", run_worker)
    monkeypatch.setattr(launch, "run_router", run_router)
    monkeypatch.setattr(launch, "run_serve", run_serve)
    monkeypatch.setattr(launch, "find_model", find_model)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_every_worker_field_survives_the_command_line(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(
        model="/models/m",
        served_name="name",
        role=Role.PREFILL,
        worker_id="prefill-7",
        router_address="10.0.0.1:99",
        host="10.0.0.2",
        device="cuda:1",
        cores=(1, 3),
        niceness=7,
        num_threads=2,
        block_size=32,
        kv_memory_bytes=123456789,
        num_blocks=77,
        max_context=1000,
        chunk_tokens=256,
        mixed_chunk_tokens=64,
        itl_target_s=0.25,
        max_running=8,
        handoff=HandoffMode.SYNC,
        partial_start=PartialStart.OFF,
        first_token=FirstToken.STEADY,
        min_push_bytes=1,
        transport=TransportChoice.TCP,
        kv_wire=KvWire.INT8,
        lease_s=1.5,
        keys="/keys",
        data_connections=2,
        probe_s=0.25,
        link_gbits=25.5,
        progress_timeout_s=3.5,
        drain_timeout_s=4.5,
        beat_interval_s=0.1,
        numerics=Numerics.BOUNDED,
        weights=Weights.INT8,
        kv_dtype=KvDtype.FLOAT16,
        kernels=Kernels.TORCH,
        metrics_host="10.0.0.2",
        metrics_port=9100,
    )
    defaults = [f.name for f in msgspec.structs.fields(config) if getattr(config, f.name) == f.default]
    assert defaults == []
    assert run(monkeypatch, *worker_arguments(msgspec.structs.replace(config, model="/m"))) == 0
    assert launched.workers == [config]


def test_a_workers_defaults_are_the_configurations(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(
        model="/models/m", served_name="m", role=Role.MIXED, worker_id="w", router_address="127.0.0.1:8001"
    )
    assert run(monkeypatch, "worker", "/m", "--worker-id", "w") == 0
    assert launched.workers == [config]


def test_every_router_field_survives_the_command_line(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RouterConfig(
        models=(("a", "/x"), ("b", "/y")),
        host="0.0.0.0",
        port=1,
        control_host="::1",
        control_port=2,
        keys="/keys",
        local_prefill_tokens=0,
        max_open_requests=3,
        max_queue_s=9.5,
        beat_interval_s=0.25,
        max_body_bytes=4096,
        max_json_depth=9,
        header_timeout_s=1.5,
        body_timeout_s=2.5,
        write_timeout_s=3.5,
        api_keys=("sk-first-key", "sk-second-key"),
        api_keys_file="/keys.toml",
        tls_cert="/cert.pem",
        tls_key="/key.pem",
        cors_origins=("https://a.example", "https://b.example"),
        decision_log="/tmp/decisions.jsonl",
        keep_timelines=7,
        otel=True,
        tool_parser=ToolParser.LLAMA3,
        reasoning_parser=ReasoningParser.THINK,
    )
    defaults = [f.name for f in msgspec.structs.fields(config) if getattr(config, f.name) == f.default]
    assert defaults == []
    assert not [part for part in router_arguments(config) if "sk-" in part]  # everybody can read a command line
    for name, value in router_environment(config):
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, *router_arguments(config)) == 0
    expected = msgspec.structs.replace(config, models=(("a", "/models/x"), ("b", "/models/y")))
    assert launched.routers == [expected]


def test_serve_takes_weights_for_each_phase(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["serve", "/m", "--prefill", "1", "--decode", "1", "--port", "0", "--decode-weights", "fp16"]
    assert run(monkeypatch, *arguments, "--weights", "int8", "--numerics", "bounded") == 0
    assert [worker.weights for worker in launched.plans[0].workers] == [Weights.INT8, Weights.FP16]
    assert run(monkeypatch, *arguments, "--weights", "int8") == 2


def test_serve_plans_workers_of_each_role(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["serve", "/m", "--prefill", "1", "--decode", "2", "--port", "0", "--kv-memory", "64M"]
    assert run(monkeypatch, *arguments, "--handoff", "sync") == 0
    plan = launched.plans[0]
    assert [worker.worker_id for worker in plan.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert {worker.kv_memory_bytes for worker in plan.workers} == {1 << 26}
    assert {worker.handoff for worker in plan.workers} == {HandoffMode.SYNC}
    assert plan.router.models == (("m", "/models/m"),)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "/m"], "nothing to serve"),
        (["serve", "/m", "--prefill", "1"], "--prefill 1 without --decode"),
        (["serve", "/bad", "--mixed", "1"], "'/bad' is not a model"),
        (["serve", "/m", "--mixed", "1", "--kv-memory", "lots"], "'lots' is no size"),
        (["serve", "/m", "--mixed", "1", "--port", "70000"], "port is 70000"),
        (["serve", "/m", "--mixed", "1", "--host", "no-such-host.invalid"], "no such address"),
        (["serve", "/m", "--mixed", "1", "--block-size", "0"], "block_size is 0"),
        (["worker", "/bad"], "'/bad' is not a model"),
        (["worker", "/m", "--cores", "x"], "is no list of cores"),
        (["worker", "/m", "--router-address", "node-7"], "'node-7' is no address"),
        (["drain", "w0", "--router-address", "node-7:x"], "'node-7:x' is no address"),
        (["router"], "no model"),
        (["router", "--model", "x"], "NAME=PATH"),
    ],
)
def test_what_cannot_work_is_one_plain_line(
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    line: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("disagg: ")
    assert line in captured.err
    assert (launched.plans, launched.workers, launched.routers) == ([], [], [])


def test_a_model_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    assert run(monkeypatch, "serve", missing, "--mixed", "1", "--port", "0") == 2
    assert capsys.readouterr().err.startswith(f"disagg: no model at {missing!r}: ")


def test_an_unknown_flag_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "serve", "/m", "--prefil", "1") == 2
    assert "--prefil" in capsys.readouterr().err


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "version") == 0
    assert capsys.readouterr().out.strip() == disagg.__version__


@pytest.mark.parametrize(
    ("command", "config", "renamed"),
    [
        ("worker", WorkerConfig, {"kv_memory_bytes": "kv_memory", "model": ""}),
        ("router", RouterConfig, {"models": "model", "api_keys": "api_key", "cors_origins": "cors_origin"}),
    ],
)
def test_help_names_every_field(command: str, config: type[msgspec.Struct], renamed: dict[str, str]) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert result.exit_code == 0
    flags = set(re.findall(r"--([a-z-]+)", result.output))
    names = {renamed.get(field.name, field.name).replace("_", "-") for field in msgspec.structs.fields(config)}
    assert names - {""} <= flags


def test_keys_makes_what_the_other_commands_take_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "keys")
    monkeypatch.setattr(sys, "argv", ["disagg", "keys", folder, "--host", "10.0.0.5", "--days", "9"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (0, None)
    assert "it expires on" in capsys.readouterr().err
    assert run(monkeypatch, "keys", folder, "--host", "10.0.0.5") == 2
    assert "is there already" in capsys.readouterr().err
    assert run(monkeypatch, "worker", "m", "--host", "10.0.0.5") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "disagg keys DIR --host 10.0.0.5" in error
    assert run(monkeypatch, "worker", "m", "--host", "10.0.0.5", "--keys", f"{folder}/10.0.0.5") == 0
    assert launched.workers[0].keys == f"{folder}/10.0.0.5"


def test_serve_gives_its_keys_to_the_router_and_every_worker(
    monkeypatch: pytest.MonkeyPatch, launched: Launched
) -> None:
    assert run(monkeypatch, "serve", "m", "--mixed", "2", "--port", "0", "--keys", "/k") == 0
    (plan,) = launched.plans
    assert [plan.router.keys, *(worker.keys for worker in plan.workers)] == ["/k"] * 3


def test_doctor_asks_the_router_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []

    def run_doctor(address: str, keys: str, *, as_json: bool) -> int:
        asked.append((address, keys, as_json))
        return 1

    monkeypatch.setattr(launch, "run_doctor", run_doctor)
    assert run(monkeypatch, "doctor", "--router", "h:5", "--keys", "/k", "--json") == 1
    assert asked == [("h:5", "/k", True)]
