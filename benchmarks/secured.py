"""What mutual TLS costs a link, what a second connection gains it, and what proving a grant costs a frame.

    python benchmarks/secured.py [--repeats 9]

64 writes of 1 MiB between two processes over loopback, timed from the first write() to the last WriteFinished
(connected before). The sides are interleaved in one run; medians are shown, each against one plain connection.

The ceiling of TLS: OpenSSL sealing and opening the same bytes in memory, with nothing sent. At each end one thread has
to do one of them besides what a plain connection does, so a connection under TLS takes no less than the time of a plain
one and that of the slower of the two. How fast OpenSSL is depends on its release: the cipher alone is shown as that of
the `cryptography` package has it, which brings a newer one than many a Python is linked with.
"""

import argparse
import json
import os
import platform
import queue
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from cryptography.hazmat.backends.openssl import backend
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from disagg.channel.keys import Keys, load_keys
from disagg.cluster.authority import make_keys
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.api import TransportEvent, Write, WriteFinished
from disagg.transport.capability import frame_proof, grant_name, pairing_token
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender

WRITE_BYTES = 1 << 20
NUM_WRITES = 64
ARENA_BYTES = NUM_WRITES * WRITE_BYTES
KEY = b"benchmark" * 6
SECRET = b"benchmark"
ME, PEER = WorkerId("prefill"), WorkerId("decode")
MINE, ITS = Incarnation(2), Incarnation(1)
PLAIN, SECURED = "one connection", "mutual TLS"
SIDES = ((PLAIN, 1, False), ("two connections", 2, False), (SECURED, 1, True), ("mutual TLS, two", 2, True))
SEALING, OPENING, NEWER, CEILING = "sealing alone", "opening alone", "newer AES alone", "ceiling of TLS"
SEALED_BYTES = 256 << 10  # at a time
NUM_PROOFS = 20_000


def serve(keys_directory: str) -> None:
    keys = load_keys(keys_directory)
    assert keys is not None
    memory = BytesMemory(ARENA_BYTES)
    receivers = []
    for _, _, is_encrypted in SIDES:
        tls = keys.accepting if is_encrypted else None
        receivers.append(TcpReceiver(memory, ITS, lambda event: None, secret=SECRET, tls=tls))
        receivers[-1].grant(ME, KEY, [Segment(0, ARENA_BYTES)])
    print(json.dumps([receiver.endpoint.address for receiver in receivers]), flush=True)
    sys.stdin.read()
    for receiver in receivers:
        receiver.close()


class Side:
    """One way to move 64 MiB."""

    def __init__(self, address: str, num_lanes: int, keys: Keys, *, is_encrypted: bool) -> None:
        self._events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self._sender = TcpSender(
            ME,
            MINE,
            BytesMemory(data=bytes(range(256)) * (ARENA_BYTES // 256)),
            self._events.put,
            TcpSenderConfig(num_lanes=num_lanes),
            tls=keys.dialling if is_encrypted else None,
        )
        self._sender.connect(PEER, Endpoint(TransportKind.TCP, address, pairing_token(SECRET, ME, MINE)), ITS)
        self._next = 0

    def run(self) -> float:
        started_s = time.perf_counter()
        for index in range(NUM_WRITES):
            run = (Segment(index * WRITE_BYTES, WRITE_BYTES),)
            self._sender.write(Write(PEER, KEY, self._next, b"", run, run))
            self._next += 1
        for _ in range(NUM_WRITES):
            event = self._events.get(timeout=60)
            if not isinstance(event, WriteFinished) or event.failure is not None:
                raise ConnectionError(f"a write failed: {event}")
        return time.perf_counter() - started_s

    def close(self) -> None:
        self._sender.close()


class Openssl:
    """Both ends of one connection within this process, joined by memory."""

    def __init__(self, keys: Keys) -> None:
        into_one, self._sealed, self._arrived, out_of_other = (ssl.MemoryBIO() for _ in range(4))
        self._one = keys.dialling.wrap_bio(into_one, self._sealed, server_hostname="localhost")
        self._other = keys.accepting.wrap_bio(self._arrived, out_of_other, server_side=True)
        left = [self._one, self._other]
        while left:
            for end in tuple(left):
                try:
                    end.do_handshake()
                    left.remove(end)
                except ssl.SSLWantReadError:
                    pass
            self._arrived.write(self._sealed.read())
            into_one.write(out_of_other.read())
        self._plain = memoryview(bytes(range(256)) * (SEALED_BYTES // 256))
        self._opened = memoryview(bytearray(SEALED_BYTES))

    @property
    def cipher(self) -> str:
        found = self._one.cipher()
        assert found is not None
        return found[0]

    def run(self) -> tuple[float, float]:
        """Seconds to seal 64 MiB, and to open them."""
        sealing_s = opening_s = 0.0
        for _ in range(ARENA_BYTES // SEALED_BYTES):
            started_s = time.perf_counter()
            self._one.write(self._plain)
            sealing_s += time.perf_counter() - started_s
            self._arrived.write(self._sealed.read())
            started_s = time.perf_counter()
            left = SEALED_BYTES
            while left:
                left -= self._other.read(left, self._opened)  # type: ignore[arg-type]
            opening_s += time.perf_counter() - started_s
        return sealing_s, opening_s


def measure(repeats: int) -> tuple[dict[str, float], str]:
    """Median MB/s by side, and the cipher."""
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder) / "keys", ("localhost",), days=1)
        directory = str(Path(folder) / "keys" / "localhost")
        keys = load_keys(directory)
        assert keys is not None
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            addresses = msgspec.json.decode(child.stdout.readline(), type=list[str])
            sides = {
                name: Side(address, num_lanes, keys, is_encrypted=is_encrypted)
                for (name, num_lanes, is_encrypted), address in zip(SIDES, addresses, strict=True)
            }
            openssl = Openssl(keys)
            times: dict[str, list[float]] = {name: [] for name in (*sides, SEALING, OPENING, NEWER)}
            for _ in range(repeats + 1):  # the first of each is a warm-up
                for name, side in sides.items():
                    times[name].append(side.run())
                for name, taken_s in zip((SEALING, OPENING), openssl.run(), strict=True):
                    times[name].append(taken_s)
                times[NEWER].append(cipher_seconds())
            for side in sides.values():
                side.close()
            child.stdin.close()
            child.wait(10)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    seconds[CEILING] = seconds[PLAIN] + max(seconds[SEALING], seconds[OPENING])
    return {name: ARENA_BYTES / 1e6 / taken_s for name, taken_s in seconds.items()}, openssl.cipher


def cipher_seconds() -> float:
    """AES-256-GCM of 64 MiB in records of 16 KiB, as `cryptography` has it."""
    cipher, record = AESGCM(AESGCM.generate_key(256)), bytes(16 << 10)
    started_s = time.perf_counter()
    for number in range(ARENA_BYTES // len(record)):
        cipher.encrypt(number.to_bytes(12), record, None)
    return time.perf_counter() - started_s


def proof_seconds() -> float:
    """Naming and proving a grant, for one frame, at one end."""
    started_s = time.perf_counter()
    for number in range(NUM_PROOFS):
        grant_name(KEY)
        frame_proof(KEY, bytes(16), number)
    return (time.perf_counter() - started_s) / NUM_PROOFS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serve", default="")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    (rates, cipher), proof_s = measure(args.repeats), proof_seconds()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {ssl.OPENSSL_VERSION}, "
        f"{cipher}; newer: {backend.openssl_version_text()}; {args.repeats} repeats"
    )
    for name, rate in rates.items():
        print(f"{name:18} {rate:8.0f} MB/s  {rate / rates[PLAIN]:5.2f} of {PLAIN}")
    print(f"mutual TLS reaches {rates[SECURED] / rates[CEILING]:.2f} of its ceiling")
    print(f"proof of one frame {1e6 * proof_s:8.1f} us")
    ratio = rates[SECURED] / rates[CEILING]
    print(json.dumps({"benchmark": "secured", "mb_per_s": rates, "tls_of_ceiling": ratio, "proof_s": proof_s}))


if __name__ == "__main__":
    main()
