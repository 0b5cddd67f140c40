"""Simulators of other projects on the same requests, workers and step times as ours."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from peers.environments import Environment, Unavailable, python_of

SIMDISTSERVE: Final = Environment("simdistserve", ("simpy==4.1.2", "numpy>=2,<3", "pandas>=2,<4"))
RUN_TIMEOUT_S: Final = 1800.0

Row = tuple[float, int, int]  # seconds from the start, prompt tokens, answer tokens


class Played(msgspec.Struct, frozen=True):
    """What a simulator said of all requests, in their order, and what that took."""

    cpu_s: float
    peak_memory_mib: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]


def play_distserve(checkout: Path, rows: Sequence[Row], num_prefill: int, num_decode: int) -> Played:
    """OPT-13B on one A100 a worker, by the fit that DistServe publishes. Raises Unavailable."""
    if not (checkout / "simdistserve" / "simulate.py").is_file():
        raise Unavailable(f"{checkout} is no checkout of DistServe: it has no simdistserve/simulate.py")
    python = python_of(SIMDISTSERVE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_text(json.dumps(list(rows)))
        command = [python, Path(__file__).with_name("run_distserve.py"), path, str(num_prefill), str(num_decode)]
        variables = {**os.environ, "PYTHONPATH": str(checkout)}
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"DistServe's simulator took more than {RUN_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise Unavailable(f"DistServe's simulator failed: {last}"[:300])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Played)
