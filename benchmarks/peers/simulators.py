"""Simulators of other projects on the same requests, workers and step times as ours.

Each runs from a checkout of its repository, in an environment of its own.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from peers.environments import Environment, Unavailable, python_of

RUN_TIMEOUT_S: Final = 1800.0

Row = tuple[float, int, int]  # seconds from the start, prompt tokens, answer tokens


class SimulatorPeer(msgspec.Struct, frozen=True):
    """One of them: what it needs, the runner beside this file, a file that its checkout has."""

    name: str
    environment: Environment
    runner: str
    landmark: str


DISTSERVE: Final = SimulatorPeer(
    "DistServe's",
    Environment("simdistserve", ("simpy==4.1.2", "numpy>=2,<3", "pandas>=2,<3")),
    "run_distserve.py",
    "simdistserve/simulate.py",
)
VIDUR: Final = SimulatorPeer(
    "Vidur",
    Environment(
        "vidur",
        (
            *("numpy>=2,<3", "pandas>=2,<3", "scikit-learn", "wandb", "ddsketch"),
            *("plotly_express", "matplotlib", "seaborn", "fasteners"),
        ),
    ),
    "run_vidur.py",
    "vidur/simulator.py",
)


class Played(msgspec.Struct, frozen=True):
    """What a simulator said of each request, in any order, and what that took."""

    cpu_s: float
    peak_memory_mib: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]


def play(
    peer: SimulatorPeer, checkout: Path, rows: Sequence[Row], words: Sequence[str], files: Mapping[str, bytes] = {}
) -> Played:
    """words: to its runner, after the rows; files: that they name. Raises Unavailable."""
    if not (checkout / peer.landmark).is_file():
        raise Unavailable(f"{checkout} is no checkout of it: there is no {peer.landmark}")
    python = python_of(peer.environment)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**files, "rows.json": json.dumps(list(rows)).encode()}.items():
            (Path(folder) / name).write_bytes(content)
        command = [str(python), str(Path(__file__).with_name(peer.runner)), "rows.json", *words]
        variables = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        try:
            done = subprocess.run(
                command, env=variables, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"it took more than {RUN_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise Unavailable(f"it failed: {last}"[:300])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Played)
