"""One model behind two deployments, as clients see them, and clients run in environments of their own."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.e2e.cluster import FAST_BEATS, SMALL

from disagg.testing.processes import Serve

ROOT = Path(__file__).parents[2]
MODEL = "tiny-llama"
KEY = "sk-conformance-0123456789"
LIMITED_KEY = "sk-conformance-limited-01"
LIMITED_REQUESTS_PER_MINUTE = 40
ENVIRONMENT = "CONFORMANCE_VENV"  # where the pinned clients are; `make conformance` makes it
NODE_FOLDER = ROOT / "tests" / "conformance" / "node"
PATHS: Mapping[str, tuple[str, ...]] = {
    "mixed": ("--mixed", "1"),
    "disaggregated": ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"),
}
_KEYS = f"""
[[keys]]
name = "tour"
key = "{KEY}"

[[keys]]
name = "limited"
key = "{LIMITED_KEY}"
requests_per_minute = {LIMITED_REQUESTS_PER_MINUTE}
"""


class Served(NamedTuple):
    """One deployment."""

    name: str
    url: str  # without /v1


@contextmanager
def serving(name: str, model: Path, keys: Path) -> Iterator[Served]:
    """A deployment that asks for keys; gone afterwards."""
    keys.write_text(_KEYS)
    arguments = (str(model), *PATHS[name], "--api-keys-file", str(keys), *SMALL, *FAST_BEATS)
    with Serve(arguments) as serve:
        yield Served(name, serve.url)


def program(name: str) -> Path:
    """A program of the clients' environment. Skips where there is none."""
    folder = Path(os.environ.get(ENVIRONMENT, ROOT / ".venv-conformance"))
    found = folder / "bin" / name
    if not found.exists():
        pytest.skip(f"no {found}: `make conformance` installs the clients")
    return found


def node() -> str:
    """Skips where there is no node, or none of its packages."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node here")
    if not (NODE_FOLDER / "node_modules" / "openai").exists():
        pytest.skip(f"no packages in {NODE_FOLDER}: `make conformance` installs them where there is npm")
    return found


def run(arguments: Sequence[str | Path], timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Nobody may ask the network, proxies or the user's own settings for anything."""
    quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    return subprocess.run(
        [str(each) for each in arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**kept, **quiet, **environment},
        check=False,
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of a tour. Fails with what went wrong, if anything did."""
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert lines, done.stderr
    told: dict[str, Any] = json.loads(lines[-1])
    print(f"{told['client']} {told['version']}: {len(told['results'])} checks")
    wrong = [f"{name}: {error}" for name, error in told["results"].items() if error is not None]
    assert told["results"], "nothing was checked"
    assert not wrong, "\n".join(wrong)
    return told
