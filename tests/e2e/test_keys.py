"""Router and workers as processes under mutual TLS: the same answers, a doctor's word, and no way in without keys."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.e2e.cluster import FAST_BEATS, START_TIMEOUT_S, Front, announced, is_ready, router, worker

from disagg.cluster.authority import make_keys
from disagg.cluster.examination import ClusterReport
from disagg.telemetry import metrics as table
from disagg.testing.processes import wait_until

pytestmark = pytest.mark.timeout(300)


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "disagg", "doctor", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def num_refused(front: Front) -> int:
    return front.readings().total(table.CONTROL_REFUSED, reason="no_tls")


def test_a_cluster_with_keys_answers_and_lets_nobody_else_in(tiny_llama: Path, tmp_path: Path) -> None:
    make_keys(tmp_path, ("localhost",), days=30)
    with_keys = ("--keys", str(tmp_path / "localhost"))
    slow_is_well = ("--link-gbits", "0.001")  # a busy machine is not what is tested here
    with router({"m": tiny_llama}, *with_keys, "--local-prefill-tokens", "0") as front_process:
        where = announced(front_process)
        more = (*FAST_BEATS, *with_keys, *slow_is_well, "--served-name", "m", "--data-connections", "2")
        prefill = worker(tiny_llama, "prefill", "p", where.control, *more)
        decode = worker(tiny_llama, "decode", "d", where.control, *more)
        with prefill, decode, Front(f"http://{where.http}") as front:
            wait_until(lambda: is_ready(front), START_TIMEOUT_S, "the cluster to be ready")
            answers = [front.complete("m", list(range(5, 5 + length)), 8) for length in (3, 40, 90)]
            assert all(len(answer.tokens) == 8 for (answer,) in answers)
            assert front.wait_counted().total(table.PROMPT_TOKENS_RECEIVED, role="decode") > 0
            front.wait_idle(2)

            well = doctor("--router", where.control, *with_keys, "--json")
            assert well.returncode == 0, well.stdout + well.stderr
            report = msgspec.json.decode(well.stdout, type=ClusterReport)
            links = [link for patient in report.patients if patient.answer for link in patient.answer.links]
            assert len(links) == 2
            assert all(link.is_encrypted and link.bytes_per_s > 0 and link.latency_s > 0 for link in links)

            stranger = doctor("--router", where.control)
            assert stranger.returncode == 2
            assert stranger.stderr.count("\n") == 1
            assert "--keys" in stranger.stderr
            wait_until(lambda: num_refused(front) == 1, START_TIMEOUT_S, "the stranger to be counted")
