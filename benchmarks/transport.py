"""Tcp and shared memory against a plain sendmsg / recvmsg_into loop over loopback, between two processes, and memcpy.

    python benchmarks/transport.py [--repeats 7]

Two shapes: one run of 64 MiB, and 4096 runs of 16 KiB scattered over both arenas. Ours is timed from write() to
WriteFinished (connected before), the plain loop from its first byte to the receiver's one-byte answer; it has no
header, no grant, no checksum and no fence. Copying the same runs within one process (memcpy) has no second process
either. The sides are interleaved in one run; medians are shown, and the mean of the processor time that both ends of a
link take together, which a busy machine changes least.
"""

import argparse
import json
import os
import platform
import queue
import random
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import xxhash

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.api import Sender, TransportEvent, Write, WriteFinished
from disagg.transport.capability import pairing_token
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.sharing import SharingDomain, draw_domain, take_domain
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender

TOTAL_BYTES = 64 << 20
ARENA_BYTES = 128 << 20
MAX_VIEWS = 1024
SEED = 7
PEER = WorkerId("decode")
ME = WorkerId("prefill")
INCARNATION = Incarnation(1)
SECRET = b"benchmark"
PLAIN, MEMCPY = "plain loop", "memcpy"  # what the others are compared with
MEMCPY_SUMMED = "memcpy, xxh3"
TCP, TCP_UNSUMMED, SHARED = "tcp, xxh3", "tcp, no checksum", "shared memory"
COMPARED = ((TCP, PLAIN), (TCP_UNSUMMED, PLAIN), (SHARED, PLAIN), (SHARED, MEMCPY), (MEMCPY_SUMMED, MEMCPY))


ASK_CPU = b"\xff"  # to the child, where a shape's number would be
CPU = struct.Struct("d")


class Shape(msgspec.Struct, frozen=True):
    """How the 64 MiB lie in each arena."""

    name: str
    source: tuple[Segment, ...]
    destination: tuple[Segment, ...]


class Ports(msgspec.Struct, frozen=True):
    """Where the child listens."""

    plain: int
    checked: str
    unchecked: str
    shared: str


def shapes() -> list[Shape]:
    whole = (Segment(0, TOTAL_BYTES),)
    return [
        Shape("1 x 64 MiB", whole, whole),
        Shape("4096 x 16 KiB", scattered(random.Random(SEED)), scattered(random.Random(SEED + 1))),
    ]


def scattered(rng: random.Random) -> tuple[Segment, ...]:
    size = 16 << 10
    places = rng.sample(range(ARENA_BYTES // size), TOTAL_BYTES // size)
    return tuple(Segment(place * size, size) for place in places)


def key_of(shape: int, number: int) -> bytes:
    return f"{shape}/{number}".encode()


# ---- the plain loop


def plain_send(sock: socket.socket, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        sent = sock.sendmsg(views[at : at + MAX_VIEWS])
        while at < len(views) and sent >= views[at].nbytes:
            sent -= views[at].nbytes
            at += 1
        if sent:
            views[at] = views[at][sent:]


def plain_receive(sock: socket.socket, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        received = sock.recvmsg_into(views[at : at + MAX_VIEWS])[0]
        if received == 0:
            raise ConnectionError("the benchmark's other side is gone")
        while at < len(views) and received >= views[at].nbytes:
            received -= views[at].nbytes
            at += 1
        if received:
            views[at] = views[at][received:]


# ---- the receiving process


def serve() -> None:
    memory = SealedBytesMemory(ARENA_BYTES)
    memory.fill(Segment(0, ARENA_BYTES), b"\1" * ARENA_BYTES)  # touch every page before anything is timed
    domain = take_domain()
    assert domain is not None
    neighbour = SharedMemoryReceiver(memory, INCARNATION, lambda event: None, domain)
    receivers = [
        TcpReceiver(memory, INCARNATION, lambda event: None, checksums=on, secret=SECRET) for on in (True, False)
    ]
    for index, shape in enumerate(shapes()):
        for receiver in (*receivers, neighbour):
            receiver.grant(ME, key_of(index, 0), shape.destination)
    listener = socket.create_server(("127.0.0.1", 0))
    addresses = [receiver.endpoint.address for receiver in (*receivers, neighbour)]
    ports = Ports(listener.getsockname()[1], *addresses)
    print(msgspec.json.encode(ports).decode(), flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    known = shapes()
    with sock, listener:
        while command := sock.recv(1):
            if command == ASK_CPU:
                sock.sendall(CPU.pack(time.process_time()))
                continue
            plain_receive(sock, memory.gather(known[command[0]].destination))
            sock.sendall(b"k")
    for receiver in (*receivers, neighbour):
        receiver.close()


# ---- the sending process


class Side:
    """One way to move a shape; run() returns seconds."""

    name: str

    def run(self, shape: int, number: int) -> float:
        raise NotImplementedError


class Plain(Side):
    name = PLAIN

    def __init__(self, port: int, memory: BytesMemory) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memory
        self._shapes = shapes()

    def run(self, shape: int, number: int) -> float:
        started_s = time.perf_counter()
        self._sock.sendall(bytes([shape]))
        plain_send(self._sock, self._memory.gather(self._shapes[shape].source))
        if self._sock.recv(1) != b"k":
            raise ConnectionError("the benchmark's other side is gone")
        return time.perf_counter() - started_s

    def cpu_s(self) -> float:
        """Processor time of both processes since they began."""
        self._sock.sendall(ASK_CPU)
        answer = self._sock.recv(CPU.size, socket.MSG_WAITALL)
        return float(CPU.unpack(answer)[0]) + time.process_time()

    def close(self) -> None:
        self._sock.close()


class Memcpy(Side):
    """The same runs from one arena to another of this process, run by run; with `sums` each is summed as well."""

    def __init__(self, name: str, source: BytesMemory, target: BytesMemory, *, sums: bool = False) -> None:
        self.name = name
        self._source = source
        self._target = target
        self._sums = sums
        self._shapes = shapes()

    def run(self, shape: int, number: int) -> float:
        plan = self._shapes[shape]
        pairs = list(zip(self._source.gather(plan.source), self._target.gather(plan.destination), strict=True))
        digest = xxhash.xxh3_64()
        started_s = time.perf_counter()
        for source, target in pairs:
            target[:] = source
            if self._sums:
                digest.update(source)
        return time.perf_counter() - started_s


class Ours(Side):
    def __init__(self, name: str, sender: Sender, events: "queue.SimpleQueue[TransportEvent]", at: Endpoint) -> None:
        self.name = name
        self._events = events
        self._sender = sender
        self._sender.connect(PEER, at, INCARNATION)
        self._shapes = shapes()

    def run(self, shape: int, number: int) -> float:
        plan = self._shapes[shape]
        started_s = time.perf_counter()
        self._sender.write(Write(PEER, key_of(shape, 0), number, b"tag", plan.source, plan.destination))
        event = self._events.get(timeout=60)
        elapsed_s = time.perf_counter() - started_s
        if not isinstance(event, WriteFinished) or event.failure is not None:
            raise ConnectionError(f"the write failed: {event}")
        return elapsed_s

    def close(self) -> None:
        self._sender.close()


def over_tcp(address: str, memory: BytesMemory, checksums: bool) -> Ours:
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    sender = TcpSender(ME, Incarnation(2), memory, events.put, TcpSenderConfig(checksums=checksums))
    name = TCP if checksums else TCP_UNSUMMED
    token = pairing_token(SECRET, ME, Incarnation(2))
    return Ours(name, sender, events, Endpoint(TransportKind.TCP, address, token))


def over_shared_memory(address: str, memory: BytesMemory, domain: SharingDomain) -> Ours:
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    sender = SharedMemorySender(ME, memory, events.put, domain)
    return Ours(SHARED, sender, events, Endpoint(TransportKind.SHARED_MEMORY, address))


class Measured(msgspec.Struct, frozen=True):
    """Of one side."""

    mb_per_s: float  # median
    cpu_ms: float  # mean, of both processes, for 64 MiB


def measure(repeats: int) -> dict[str, dict[str, Measured]]:
    """By shape and side."""
    domain = draw_domain()
    environment = {**os.environ, **domain.environment()}
    child = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    try:
        ports = msgspec.json.decode(child.stdout.readline(), type=Ports)
        memory = SealedBytesMemory(data=random.Random(SEED).randbytes(1 << 20) * (ARENA_BYTES >> 20))
        plain = Plain(ports.plain, memory)
        ours = [
            over_tcp(ports.checked, memory, True),
            over_tcp(ports.unchecked, memory, False),
            over_shared_memory(ports.shared, memory, domain),
        ]
        target = BytesMemory(ARENA_BYTES)
        target.fill(Segment(0, ARENA_BYTES), b"\1" * ARENA_BYTES)
        copies = [Memcpy(MEMCPY, memory, target), Memcpy(MEMCPY_SUMMED, memory, target, sums=True)]
        sides: Sequence[Side] = [plain, *ours, *copies]
        result: dict[str, dict[str, Measured]] = {}
        for index, shape in enumerate(shapes()):
            times: dict[str, list[float]] = {side.name: [] for side in sides}
            cpu: dict[str, list[float]] = {side.name: [] for side in sides}
            for number in range(repeats + 1):  # the first of each is a warm-up
                for side in sides:
                    before_s = plain.cpu_s()
                    times[side.name].append(side.run(index, number))
                    cpu[side.name].append(plain.cpu_s() - before_s)
            result[shape.name] = {
                name: Measured(TOTAL_BYTES / 1e6 / statistics.median(taken[1:]), 1e3 * statistics.mean(cpu[name][1:]))
                for name, taken in times.items()
            }
        for each in ours:
            each.close()
        plain.close()
        child.wait(10)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    return result


def hardware() -> str:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def commit() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    result = measure(args.repeats)
    facts = {
        "benchmark": "transport",
        "hardware": hardware(),
        "seed": SEED,
        "commit": commit(),
        "repeats": args.repeats,
    }
    print(", ".join(f"{name}: {value}" for name, value in facts.items()) + "; medians, interleaved, loopback")
    for shape, sides in result.items():
        print(f"\n{shape}")
        for name, side in sides.items():
            shown = (
                f"x {side.mb_per_s / sides[than].mb_per_s:.2f} of {than}" for each, than in COMPARED if each == name
            )
            print(f"  {name:18} {side.mb_per_s:8.0f} MB/s {side.cpu_ms:6.1f} ms CPU   {', '.join(shown)}".rstrip())
        print(f"  the checksum's share of tcp's time: {1 - sides[TCP].mb_per_s / sides[TCP_UNSUMMED].mb_per_s:.0%}")
        print(f"  the plain loop's CPU over tcp's: {sides[PLAIN].cpu_ms / sides[TCP].cpu_ms:.2f}")
    rates = {shape: {name: side.mb_per_s for name, side in sides.items()} for shape, sides in result.items()}
    cpu_ms = {shape: {name: side.cpu_ms for name, side in sides.items()} for shape, sides in result.items()}
    print(json.dumps({**facts, "mb_per_s": rates, "cpu_ms": cpu_ms, "ratios": ratios(rates)}))


def ratios(rates: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """By shape and pair of sides."""
    return {
        shape: {f"{name} / {than}": sides[name] / sides[than] for name, than in COMPARED}
        for shape, sides in rates.items()
    }


if __name__ == "__main__":
    main()
