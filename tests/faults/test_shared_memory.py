"""Workers of one supervisor hand KV off in shared memory; writers that die, stop or go on late spoil nothing.

The cluster's own answers are the reference: the same prompts are asked again while a worker is killed, or stopped and
let go on, again and again. Afterwards every block is free or cached on every worker.
"""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.cluster import Answer, Front, go_on

from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until
from disagg.transport.sharing import SHARING_SECRET

MODEL = "tiny-llama"
NUM_WORKERS = 3
ARGUMENTS = ("--prefill", "1", "--decode", "2", "--local-prefill-tokens", "0", "--chunk-tokens", "16")
LIVES = ("--beat-interval-s", "1.5", "--lease-s", "3", "--max-crashes", "1000", "--max-restart-delay-s", "0.2")
SIZES = ("--kv-memory", "16M", "--num-threads", "1", "--min-push-bytes", "1K")
TIMEOUT_S = 90.0
PROMPTS = [[3 + (salt * 37 + index * (salt + 1)) % 300 for index in range(400)] for salt in range(4)]
LENGTH = 24
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[tuple[Serve, Front]]:
    """Of the transport that is its parameter; tests of one transport share it, and leave it whole."""
    transport: str = request.param
    # Nothing is measured: on a busy machine the faster kind is not always the same.
    arguments = (str(tiny_llama), *ARGUMENTS, *LIVES, *SIZES, "--transport", transport, "--probe-s", "0")
    with Serve(arguments) as serve, Front(serve.url, timeout_s=TIMEOUT_S) as front:
        yield serve, front


def ask_all(front: Front) -> list[list[Answer]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: front.complete(MODEL, prompt, LENGTH), PROMPTS))


@pytest.mark.parametrize(("cluster", "kind"), [("auto", "shared_memory"), ("tcp", "tcp")], indirect=["cluster"])
def test_neighbours_take_shared_memory_unless_told_otherwise(cluster: tuple[Serve, Front], kind: str) -> None:
    serve, front = cluster
    before = front.readings()
    ask_all(front)
    counted = front.settled({"prefill": len(PROMPTS)}, before)
    assert counted.total(table.HANDOFF_BYTES) > 0
    serve.wait_line("goes over", TIMEOUT_S)
    taken = [line for line in serve.lines if "goes over" in line]
    environment = Path(f"/proc/{serve.pid_of('router')}/environ").read_bytes()
    assert SHARING_SECRET.encode() not in environment  # whoever serves the outside world knows it not
    assert taken
    assert all(line.endswith(f"goes over {kind}") for line in taken), taken
    front.wait_idle(NUM_WORKERS)


@contextlib.contextmanager
def asking(front: Front, answers: list[list[list[Answer]]]) -> Iterator[None]:
    """Somebody asks all prompts, over and over."""
    has_enough = threading.Event()

    def ask() -> None:
        while not has_enough.is_set():
            answers.append(ask_all(front))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            has_enough.set()
            asked.result(2 * TIMEOUT_S)


def disturb(serve: Serve, front: Front, name: str, how: str, rng: random.Random) -> None:
    """One fault at any moment of a hand-off."""
    time.sleep(rng.uniform(0.0, 0.4))  # the moment is chance: states are hit in test_late_writers.py
    pid = serve.kill(name, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "resumed":
        time.sleep(rng.uniform(0.1, 1.0))
        go_on(pid)
        wait_until(lambda: is_running(serve, name), TIMEOUT_S, f"{name} to run")  # it may have stood still for too long
    else:  # a stopped one is ended by those who watch it
        serve.wait_restarted(name, pid)
    wait_until(lambda: is_whole(front), TIMEOUT_S, f"{name} to be back")


def is_running(serve: Serve, name: str) -> bool:
    with contextlib.suppress(InternalFault):
        return bool(serve.pid_of(name))
    return False


def is_whole(front: Front) -> bool:
    workers = front.cluster().workers
    return len(workers) == NUM_WORKERS and all(worker.connected for worker in workers)


CASES = [
    pytest.param("auto", "killed", 2),
    pytest.param("auto", "resumed", 2),
    *(
        pytest.param(transport, how, 10, marks=pytest.mark.slow)
        for transport in ("auto", "tcp")
        for how in ("resumed", "killed", "stopped")
    ),
]


@pytest.mark.parametrize(("cluster", "how", "num_faults"), CASES, indirect=["cluster"])
def test_faults_of_a_writer_spoil_no_answer_and_no_block(
    cluster: tuple[Serve, Front], how: str, num_faults: int
) -> None:
    rng = random.Random(how)
    serve, front = cluster
    expected = ask_all(front)
    answers: list[list[list[Answer]]] = []
    with asking(front, answers):
        for number in range(num_faults):
            name = rng.choice(["prefill-0", "prefill-0", "decode-0"]) if number else "prefill-0"
            disturb(serve, front, name, how, rng)
    assert answers
    assert all(each == expected for each in answers)
    serve.wait_healthy()
    assert ask_all(front) == expected
    front.wait_idle(NUM_WORKERS, timeout_s=TIMEOUT_S)
