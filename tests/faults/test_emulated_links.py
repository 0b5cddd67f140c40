"""Links between two network namespaces: they are as slow as they say, leave nothing, and the system works over them."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.e2e.cluster import Front

from disagg.cluster.examination import ClusterReport
from disagg.telemetry.metrics import PARTIAL_STARTS
from disagg.testing.links.cluster import SpreadCluster
from disagg.testing.links.namespaces import ADDRESSES, LinkedNamespaces, missing
from disagg.testing.links.shape import LinkShape
from disagg.testing.processes import command_line, wait_until

pytestmark = pytest.mark.timeout(300)

QUICK, SLOW = LinkShape(100), LinkShape(100, 0.02)
SHAPES = pytest.mark.parametrize("shape", [QUICK, SLOW], ids=lambda shape: shape.name)
NUM_BYTES = 2 << 20
NUM_LOOKS = 3
MOST_PROMPTS = 10
TIMEOUT_S = 60.0
DEVICES = Path("/sys/class/net")


def needs(shape: LinkShape) -> None:
    if reason := missing(shape):
        pytest.skip(reason)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """What earlier tests have left may go meanwhile; nothing may stay that was not there."""
    gc.collect()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count(), set(os.listdir(DEVICES)))

    def is_gone() -> bool:
        num_fds, num_threads, devices = before
        return (
            len(os.listdir("/proc/self/fd")) <= num_fds
            and threading.active_count() <= num_threads
            and set(os.listdir(DEVICES)) <= devices
        )

    yield
    wait_until(is_gone, TIMEOUT_S, f"no more than {before} to be there")


def seconds_for(near: socket.socket, far: socket.socket, num_bytes: int) -> float:
    """To have so many bytes at the far end and one back."""

    def take() -> None:
        left = num_bytes
        while left:
            left -= len(far.recv(min(left, 1 << 16)))
        far.sendall(b"!")

    taker = threading.Thread(target=take)
    taker.start()
    started_s = time.perf_counter()
    near.sendall(bytes(num_bytes))
    near.recv(1)
    taker.join()
    return time.perf_counter() - started_s


@SHAPES
@pytest.mark.usefixtures("nothing_left")
def test_a_link_is_no_better_than_it_says(shape: LinkShape) -> None:
    needs(shape)
    with LinkedNamespaces(shape) as pair:
        with (
            pair.run_inside(1, lambda: socket.create_server((ADDRESSES[1], 0))) as listener,
            pair.run_inside(0, lambda: socket.create_connection(listener.getsockname(), 10.0)) as near,
            listener.accept()[0] as far,
        ):
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far.settimeout(TIMEOUT_S)
            near.settimeout(TIMEOUT_S)
            round_trip_s = min(seconds_for(near, far, 1) for _ in range(5))
            assert round_trip_s >= shape.round_trip_s
            before = pair.num_bytes_sent(0)
            rates = [NUM_BYTES / seconds_for(near, far, NUM_BYTES) / shape.bytes_per_s for _ in range(NUM_LOOKS)]
            assert pair.num_bytes_sent(0) - before > NUM_LOOKS * NUM_BYTES
            # No look shows more than there is; that a process had to wait in one of them is the machine's affair.
            assert 0.1 < max(rates) < 1.1, rates
        pair.check_invariants()


def test_the_ends_reach_nobody_else() -> None:
    needs(QUICK)
    with LinkedNamespaces(QUICK) as pair, socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(OSError, match="refused"):
            pair.run_inside(0, lambda: socket.create_connection(listener.getsockname(), 2.0).close())
        with pair.entered(1), pytest.raises(OSError, match="refused"):
            socket.create_connection(listener.getsockname(), 2.0).close()
        socket.create_connection(listener.getsockname(), 2.0).close()  # home again


HOLD = """
import sys
from disagg.testing.links.namespaces import LinkedNamespaces
from disagg.testing.links.shape import LinkShape
with LinkedNamespaces(LinkShape(100, 0.02)) as pair:
    print(pair._forwarder.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_holder_leaves_no_process() -> None:
    needs(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        forwarder = int(holder.stdout.readline())
        assert "links.forwarder" in command_line(forwarder)
        holder.send_signal(signal.SIGKILL)
    wait_until(lambda: "links.forwarder" not in command_line(forwarder), TIMEOUT_S, "the end of the process in between")


@pytest.mark.parametrize(("shape", "claimed_gbits", "code"), [(QUICK, "0.1", 0), (SLOW, "10", 1)], ids=["well", "slow"])
def test_the_doctor_tells_a_slow_link(shape: LinkShape, claimed_gbits: str, code: int, tiny_llama: Path) -> None:
    """A prompt goes over it, under TLS; what the doctor measures is the link's rate, judged by what it should be."""
    needs(shape)
    arguments = ("--kv-memory", "8M", "--link-gbits", claimed_gbits)
    with (
        LinkedNamespaces(shape) as pair,
        pair.entered(0),
        SpreadCluster(pair, tiny_llama, "m", arguments) as cluster,
    ):
        body = {"model": "m", "prompt": list(range(5, 69)), "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
        assert answer.json()["usage"]["completion_tokens"] == 4

        def learned() -> list[float]:
            view = httpx.get(f"{cluster.url}/cluster", timeout=10.0, trust_env=False, verify=False).json()
            return [link["bytes_per_s"] for each in view["workers"] for link in each["state"]["links"]]

        wait_until(lambda: any(rate > 0 for rate in learned()), TIMEOUT_S, "/cluster to show what was learned")
        asked = ("doctor", "--router", cluster.control_address, "--keys", cluster.keys[0], "--json")
        found = subprocess.run(
            [sys.executable, "-m", "disagg", *asked],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        report = msgspec.json.decode(found.stdout, type=ClusterReport)
        assert found.returncode == code, report.findings
        links = [link for patient in report.patients if patient.answer for link in patient.answer.links]
        (link,) = [link for link in links if link.peer == "decode-0"]
        assert (link.transport, link.is_encrypted) == ("tcp", True)
        assert link.latency_s >= shape.round_trip_s
        assert 0.05 < link.bytes_per_s / shape.bytes_per_s < 1.3
        if code:
            (finding,) = report.findings
            assert "of the 10 Gbit/s that the link should give" in finding


def test_a_first_step_begins_while_layers_are_on_a_slow_link(tiny_llama: Path) -> None:
    """From the second prompt on the link's rate is known. Asked again, it finds its prefix here: its answer is equal.

    A worker that had to wait for its turn may find all layers here when it comes to the step: then the next prompt's.
    """
    shape = LinkShape(5)
    needs(shape)
    arguments = ("--kv-memory", "8M", "--min-push-bytes", "1K", "--chunk-tokens", "700")
    prompts = [[(7 * step + 11 * number) % 300 + 5 for step in range(600)] for number in range(MOST_PROMPTS)]
    with (
        LinkedNamespaces(shape) as pair,
        pair.entered(0),
        SpreadCluster(pair, tiny_llama, "m", arguments) as cluster,
        Front(cluster.url) as front,
    ):

        def num_begun() -> int:
            return front.wait_counted(TIMEOUT_S).total(PARTIAL_STARTS, outcome="finished")

        first: list[tuple[str, ...]] = []
        while num_begun() < 2 and len(first) < MOST_PROMPTS:
            first.append(front.complete("m", prompts[len(first)], 6, ignore_eos=True)[0].tokens)
        assert num_begun() >= 2
        again = [front.complete("m", prompt, 6, ignore_eos=True)[0].tokens for prompt in prompts[: len(first)]]
        assert again == first
