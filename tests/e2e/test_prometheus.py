"""A real Prometheus reads what is in monitoring/, and a cluster's metrics: rules load, scrapes hold, queries answer.

Skipped where Prometheus is not installed (Debian package `prometheus`).
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.cluster import FAST_BEATS, START_TIMEOUT_S, Front, announced, is_ready, reserved_ports, router, worker
from tests.unit.test_monitoring import expressions

from disagg.telemetry.metrics import WORKER_METRICS
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import MarkedProcess, wait_until

MONITORING = Path(__file__).parents[2] / "monitoring"
TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="Prometheus is not installed here (apt install prometheus)",
    ),
]


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, int]]:
    """A cluster with a prefill worker that shows metrics of its own; its router, and that worker's port."""
    model = write_tiny_llama(tmp_path_factory.mktemp("served") / "tiny", seed=1)
    with (
        reserved_ports(1) as (port,),
        router({"tiny": model}, *FAST_BEATS, "--local-prefill-tokens", "0") as front_process,
    ):
        where = announced(front_process)
        shown = ("--metrics-port", str(port))
        with (
            worker(model, "prefill", "p0", where.control, *FAST_BEATS, *shown) as prefill,
            worker(model, "decode", "d0", where.control, *FAST_BEATS),
            Front(f"http://{where.http}") as front,
        ):
            wait_until(lambda: is_ready(front), START_TIMEOUT_S, "the cluster to be ready")
            prefill.wait_line(rf"metrics at http://127.0.0.1:{port}/metrics", TIMEOUT_S)
            front.complete("tiny", list(range(5, 60)), 5)
            front.wait_counted()
            yield front, port


def test_configuration_and_rules_load() -> None:
    found = promtool("check", "config", str(MONITORING / "prometheus.yml"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SUCCESS" in found.stdout
    assert f"{(MONITORING / 'alerts.yml').read_text().count('- alert:')} rules found" in found.stdout


def test_promtool_finds_nothing_wrong_with_the_text(served: tuple[Front, int]) -> None:
    front, port = served
    own = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S, trust_env=False)
    for text in (front.client.get("/metrics").text, own.text):
        found = promtool("check", "metrics", text=text)
        # Its taste in names is not ours everywhere: what must not be is text that does not parse.
        assert "error while linting" not in found.stderr
        assert found.returncode in (0, 3), found.stderr


def test_prometheus_scrapes_the_cluster_and_answers_what_the_files_ask(
    served: tuple[Front, int], tmp_path: Path, free_port: int
) -> None:
    front, worker_port = served
    config = tmp_path / "prometheus.yml"
    targets = {"127.0.0.1:8000": front.url.removeprefix("http://")}
    text = (MONITORING / "prometheus.yml").read_text().replace("scrape_interval: 5s", "scrape_interval: 1s")
    text = text.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    for old, new in targets.items():
        assert old in text
        text = text.replace(old, new)
    text = text.replace("- alerts.yml", f"- {MONITORING / 'alerts.yml'}")
    text += f'  - job_name: workers\n    static_configs:\n      - targets: ["127.0.0.1:{worker_port}"]\n'
    config.write_text(text)
    arguments = (
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{free_port}",
    )
    with MarkedProcess(arguments, program=("prometheus",)):
        client = httpx.Client(base_url=f"http://127.0.0.1:{free_port}", timeout=TIMEOUT_S, trust_env=False)
        with client:
            wait_until(lambda: is_up(client), TIMEOUT_S, "both targets to be scraped")
            blocks = 'sum by (worker) (disagg_blocks{job="disagg"})'
            wait_until(lambda: workers_of(client, blocks) == {"p0", "d0"}, TIMEOUT_S, "the blocks of both workers")
            own = 'count by (worker) ({job="workers", __name__=~"disagg_.+"})'
            wait_until(lambda: workers_of(client, own) == {"p0"}, TIMEOUT_S, "the prefill worker's own metrics")
            wanted = {metric.name for metric in WORKER_METRICS if not metric.label}
            wait_until(lambda: wanted <= names_of(client), TIMEOUT_S, f"all of {wanted}")
            wait_until(lambda: num_sent(client) >= 1, TIMEOUT_S, "the hand-off to be counted")
            wait_until(lambda: has_evaluated(client), TIMEOUT_S, "every rule to be evaluated")
            rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
            assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
            for query in expressions():
                if not query.startswith(("label_values", "prometheus")):
                    ask(client, query.replace("$__rate_interval", "30s").replace("$job", ".+"))


# What a scrape that came too late would have told is not known until the next: so all is asked for again.


def workers_of(client: httpx.Client, query: str) -> set[str]:
    return {sample["metric"]["worker"] for sample in ask(client, query)}


def names_of(client: httpx.Client) -> set[str]:
    return {sample["metric"]["__name__"] for sample in ask(client, '{__name__=~"disagg_.+"}')}


def num_sent(client: httpx.Client) -> float:
    samples = ask(client, 'disagg_handoffs_total{job="disagg", outcome="sent"}')
    return sum(float(sample["value"][1]) for sample in samples)


def ask(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    """Samples of an instant query."""
    answer = client.get("/api/v1/query", params={"query": query})
    assert answer.status_code == httpx.codes.OK, f"{query}: {answer.text}"
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


def is_up(client: httpx.Client) -> bool:
    try:
        return [sample["value"][1] for sample in ask(client, "up")] == ["1", "1"]
    except (httpx.HTTPError, AssertionError):
        return False


def has_evaluated(client: httpx.Client) -> bool:
    rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    return all(rule["health"] != "unknown" for rule in rules)


# What is wrong, as series of one hour; and the alerts that it must raise, these alone.
WRONG = """
rule_files: ["RULES"]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - {series: 'disagg_model_ready{job="disagg",model="tiny"}', values: "0+0x120"}
      - {series: 'disagg_placements_total{job="disagg",reason="no_prefill_worker"}', values: "0+3x120"}
      - {series: 'disagg_placements_total{job="disagg",reason="long_prompt"}', values: "0+30x120"}
      - {series: 'disagg_requests_total{job="disagg",outcome="finished"}', values: "0+30x120"}
      - {series: 'disagg_rejections_total{job="disagg",reason="overloaded"}', values: "0+3x120"}
      - {series: 'disagg_rejections_total{job="disagg",reason="impossible"}', values: "0+90x120"}
      - {series: 'disagg_blocks{job="disagg",worker="d0",state="free"}', values: "1+0x120"}
      - {series: 'disagg_blocks{job="disagg",worker="d0",state="held"}', values: "99+0x120"}
      - {series: 'disagg_sequences_waiting{job="disagg",worker="d0"}', values: "2+0x120"}
      - {series: 'disagg_blocks{job="disagg",worker="d1",state="free"}', values: "1+0x120"}
      - {series: 'disagg_blocks{job="disagg",worker="d1",state="held"}', values: "99+0x120"}
      - {series: 'disagg_sequences_waiting{job="disagg",worker="d1"}', values: "0+0x120"}
      - {series: 'disagg_worker_up{job="disagg",worker="d0",role="decode"}', values: "1+0x120"}
      - {series: 'disagg_worker_up{job="disagg",worker="d1",role="decode"}', values: "1+0x112 stale"}
      - {series: 'disagg_landings_rejected_total{job="disagg",worker="d0"}', values: "0+0x110 1+0x9"}
      - {series: 'disagg_time_to_first_token_seconds_bucket{job="disagg",le="10.0"}', values: "0+9x120"}
      - {series: 'disagg_time_to_first_token_seconds_bucket{job="disagg",le="20.0"}', values: "0+10x120"}
      - {series: 'disagg_time_to_first_token_seconds_bucket{job="disagg",le="+Inf"}', values: "0+10x120"}
      - {series: 'disagg_moves_total{job="disagg",cause="drain"}', values: "0+90x120"}
      - {series: 'disagg_requests_open{job="disagg"}', values: "3+0x120"}
      - {series: 'disagg_generation_tokens_total{job="disagg"}', values: "5000+0x120"}
      - {series: 'disagg_prompt_tokens_computed_total{job="disagg",worker="d0",task="decode"}', values: "0+30x120"}
      - {series: 'disagg_prompt_tokens_computed_total{job="disagg",worker="p0",task="prefill"}', values: "0+900x120"}
      - {series: 'disagg_prompt_tokens_received_total{job="disagg",worker="d0"}', values: "0+100x120"}
      - {series: 'disagg_pairings_refused_total{job="disagg",worker="p0"}', values: "0+0x110 1+0x9"}
      - {series: 'disagg_sequences_total{job="disagg",worker="p0",outcome="lease_expired"}', values: "0+1x120"}
      - {series: 'disagg_slow_links_total{job="disagg",worker="p0",transport="tcp"}', values: "_x112 1+0x7"}
      - {series: 'disagg_sequences_total{job="disagg",worker="d0",outcome="cancelled"}', values: "0+9x120"}
    promql_expr_test:
      - expr: count by (alertname, worker) (ALERTS{alertstate="firing"})
        eval_time: 1h
        exp_samples:
          - {labels: '{alertname="DisaggModelNotReady"}', value: 1}
          - {labels: '{alertname="DisaggStalled"}', value: 1}
          - {labels: '{alertname="DisaggReadTwice"}', value: 1}
          - {labels: '{alertname="DisaggPairingRefused", worker="p0"}', value: 1}
          - {labels: '{alertname="DisaggLeasesExpire", worker="p0"}', value: 1}
          - {labels: '{alertname="DisaggSlowLink", worker="p0"}', value: 1}
          - {labels: '{alertname="DisaggFallingBack"}', value: 1}
          - {labels: '{alertname="DisaggTurningAway"}', value: 1}
          - {labels: '{alertname="DisaggKvFull", worker="d0"}', value: 1}
          - {labels: '{alertname="DisaggWorkersMissing"}', value: 1}
          - {labels: '{alertname="DisaggDamagedKv", worker="d0"}', value: 1}
          - {labels: '{alertname="DisaggSlowFirstToken"}', value: 1}
"""


def test_alerts_are_raised_by_what_is_wrong_and_by_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    path.write_text(WRONG.replace("RULES", str(MONITORING / "alerts.yml")))
    found = promtool("test", "rules", str(path))
    assert found.returncode == 0, found.stdout + found.stderr
