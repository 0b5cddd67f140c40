"""Class K: who has no keys gets nothing and leaves nothing behind; what nobody knows costs nothing.

=== ===============================================================================================================
K1  Registering, pairing, operating and transferring without a certificate of the authority: refused, counted, no
    state. With keys everything works as without, and both connections are encrypted.
K2  Ids, grants, hand-offs and peers that nobody knows: memory stays flat. DISAGG_UNKNOWN says how many; by default
    some thousands.
K3  Nothing runs what it reads (no pickle and its like); sockets that others can reach need keys; default is loopback.
    Bytes that are random, truncated, huge or nested: tests/property/test_fuzz.py and `make fuzz`.
    Another tenant's KV: test_class_k_tenants.py. Fields that would say where a request runs: tests/e2e.
=== ===============================================================================================================
"""

import ast
import asyncio
import contextlib
import gc
import os
import socket
import ssl
import subprocess
import sys
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.faults import loopback
from tests.faults.loopback import live_router, live_worker, paired
from tests.unit.scheduler.rigs import Solo
from tests.unit.transport.rigs import (
    RECEIVER_INCARNATION,
    EventLog,
    greet,
    raw_header,
    read_ack,
    read_challenge,
    read_welcome,
)
from tests.unit.worker.rigs import DEADLINE_S, until

import disagg
from disagg.channel.channel import dial
from disagg.channel.keys import load_keys
from disagg.channel.listening import MAX_STRANGERS
from disagg.channel.tally import Refusal
from disagg.cluster.authority import make_keys
from disagg.cluster.drain import ask_drain
from disagg.core.endpoints import is_loopback
from disagg.core.errors import ConfigurationError, Failure, FailureKind, PeerLost
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import Role
from disagg.kvcache.memory import Segment
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    Message,
    RegisterWorker,
    RenewLeases,
    RequestCluster,
    RequestDrain,
    RequestExamination,
    RequestPairing,
    RequestReservation,
    TakeHandoff,
)
from disagg.router.config import RouterConfig
from disagg.telemetry import metrics as table
from disagg.testing.memory import BytesMemory
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.wire import NO_PROOF, TRAILER_BYTES, Hello, Item, encode
from disagg.worker.config import WorkerConfig

pytestmark = pytest.mark.usefixtures("no_socket_left")

NUM_UNKNOWN = int(os.environ.get("DISAGG_UNKNOWN", "4000"))
ANYTHING: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(cast(type, Message))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("authority")
    make_keys(folder, ("localhost",), days=1)
    return str(folder / "localhost")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Keys of another authority."""
    folder = tmp_path_factory.mktemp("another")
    make_keys(folder, ("localhost",), days=1)
    return str(folder / "localhost")


def stranger_tls(kind: str, keys: str, foreign: str) -> ssl.SSLContext | None:
    """What somebody who is not of the cluster could try."""
    if kind == "plain":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if kind == "another authority":
        context.load_cert_chain(f"{foreign}/node.pem", f"{foreign}/node.key")
    if kind == "old TLS":
        context.load_cert_chain(f"{keys}/node.pem", f"{keys}/node.key")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


async def said_to(address: str, message: object, tls: ssl.SSLContext | None) -> object:
    """The answer."""
    channel = await dial(address, ANYTHING, timeout_s=DEADLINE_S, tls=tls)
    try:
        channel.send(message)
        return await channel.receive(DEADLINE_S)
    finally:
        await channel.close()


STRANGERS = ["plain", "no certificate", "another authority", "old TLS"]


# --- K1 ----------------------------------------------------------------------------------------------------------


async def test_k1_with_keys_all_works_and_every_connection_is_encrypted(keys: str) -> None:
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(keys=keys))
        prefill = await stack.enter_async_context(live_worker("p", Role.PREFILL, address, keys=keys))
        decode = await stack.enter_async_context(live_worker("d", Role.DECODE, address, keys=keys))
        await paired(served)
        async with asyncio.timeout(3 * DEADLINE_S):
            await asyncio.gather(*(loopback.read_whole(*loopback.ask(served, number)) for number in range(10)))
        await loopback.settled(prefill, decode)
        assert decode.worker.scheduler.counters.get(table.PROMPT_TOKENS_RECEIVED) > 0
        (link,) = await prefill.peers.examine()
        assert link.is_encrypted


@pytest.mark.parametrize("kind", STRANGERS)
async def test_k1_a_stranger_can_neither_register_nor_operate(kind: str, keys: str, foreign: str) -> None:
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(keys=keys))
        worker = await stack.enter_async_context(live_worker("m", Role.MIXED, address, keys=keys))
        registry = served.dispatcher.registry
        await until(lambda: registry.get(WorkerId("m")) is not None)
        card = msgspec.structs.replace(worker.peers.card, worker_id=WorkerId("intruder"))
        messages = (RegisterWorker(card), RequestDrain(WorkerId("m")), RequestCluster())
        for message in messages:
            with pytest.raises(PeerLost):
                await said_to(address, message, stranger_tls(kind, keys, foreign))
        assert [record.card.worker_id for record in registry.records()] == ["m"]
        assert not worker.worker.scheduler.is_draining
        assert served._server is not None
        await until(lambda: served._server is not None and served._server.num_strangers == 0)
        counters = served.dispatcher.counters
        await until(lambda: counters.get(table.CONTROL_REFUSED, Refusal.NO_TLS.value) == len(messages))


@pytest.mark.parametrize("kind", STRANGERS)
async def test_k1_a_stranger_can_neither_pair_nor_ask_a_worker_nor_send_to_it(
    kind: str, keys: str, foreign: str
) -> None:
    async with live_router(keys=keys) as (_, address), live_worker("d", Role.DECODE, address, keys=keys) as worker:
        card = msgspec.structs.replace(worker.peers.card, worker_id=WorkerId("intruder"), role=Role.PREFILL)
        for message in (RequestPairing(card), RequestExamination()):
            with pytest.raises(PeerLost):
                await said_to(worker.peers.card.control_address, message, stranger_tls(kind, keys, foreign))
        assert worker.peers._links == {}
        (endpoint,) = worker.peers.card.data_endpoints
        assert endpoint.token == b""  # what the router knows lets nobody in
        await asyncio.to_thread(_fail_to_send, endpoint.address, stranger_tls(kind, keys, foreign))
        counters = worker.worker.scheduler.counters
        await until(lambda: counters.get(table.PEERS_REFUSED, Refusal.NO_TLS.value) == 2)
        await until(lambda: counters.get(table.DATA_REFUSED, Refusal.NO_TLS.value) == 1)


def _fail_to_send(address: str, tls: ssl.SSLContext | None) -> None:
    """A frame, straight away: not one byte of an answer that makes sense comes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as plain, contextlib.suppress(OSError):
        sock = tls.wrap_socket(plain) if tls is not None else plain
        with sock:
            sock.sendall(b"DgKV" + bytes(60))
            assert not sock.recv(4).startswith(b"DgKV")


async def test_k1_a_worker_does_not_talk_to_a_router_that_cannot_prove_itself(keys: str, foreign: str) -> None:
    async with live_router(keys=foreign) as (served, address):
        loaded = load_keys(keys)
        assert loaded is not None
        with pytest.raises(PeerLost, match="not trusted"):
            await dial(address, ANYTHING, timeout_s=DEADLINE_S, tls=loaded.dialling)
        with pytest.raises(ConfigurationError, match="not trusted"):
            await asyncio.to_thread(ask_drain, "m", address, keys)
        assert served.dispatcher.registry.records() == []


async def test_k1_silent_connections_are_capped_and_a_worker_gets_in_between_them(keys: str) -> None:
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router(keys=keys))
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MAX_STRANGERS)]
        served.check_invariants()
        await stack.enter_async_context(live_worker("m", Role.MIXED, address, keys=keys))
        await until(lambda: served.dispatcher.registry.get(WorkerId("m")) is not None)
        assert served._server is not None
        assert served._server.refused.counts()[Refusal.FULL] >= MAX_STRANGERS
        for _, writer in silent:
            writer.transport.abort()
        await until(lambda: served._server is not None and served._server.num_strangers == 0)


# --- K2 ----------------------------------------------------------------------------------------------------------


def grown_by(before: int) -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def test_k2_hand_offs_that_nobody_knows_leave_nothing_in_a_worker() -> None:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    failure = Failure(FailureKind.CANCELLED, "x")

    def attack(first: int, stop: int) -> None:
        for number in range(first, stop):
            unknown = HandoffId(SequenceId(RequestId(Incarnation(number), number), 0), 1)
            fence = Fence(Incarnation(number), Incarnation(2), 1)
            for message in (
                RequestReservation(unknown, fence, 10),
                AnswerReservation(unknown, fence),
                FinishPrefill(unknown, fence, EmittedToken(unknown.sequence_id, 0, 7)),
                TakeHandoff(unknown, fence),
                CancelHandoff(unknown, fence, failure),
                RenewLeases((unknown,), 30.0),
            ):
                solo.hear(message)

    attack(0, 1000)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        attack(1000, 1000 + NUM_UNKNOWN // 4)
        assert grown_by(before) < 64_000
    finally:
        tracemalloc.stop()
    assert solo.scheduler.is_idle


def test_k2_grants_that_nobody_knows_leave_nothing_in_a_receiver() -> None:
    log = EventLog()
    receiver = TcpReceiver(BytesMemory(1000), RECEIVER_INCARNATION, log.post)
    host, _, port = receiver.endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
        nonce = greet(sock, receiver)

        def attack(first: int, stop: int) -> None:
            for number in range(first, stop):
                sock.sendall(unknown_frame(number, nonce))
                assert "not granted" in (read_ack(sock).failure or "")

        attack(0, 200)
        tracemalloc.start()
        try:
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            attack(200, 200 + NUM_UNKNOWN)
            assert grown_by(before) < 64_000
        finally:
            tracemalloc.stop()
    receiver.check_invariants()
    receiver.close()
    assert receiver.refused.counts() == {Refusal.NO_GRANT: 200 + NUM_UNKNOWN}
    assert log.events == []


def unknown_frame(number: int, nonce: bytes) -> bytes:
    header = raw_header(f"unknown {number}".encode(), nonce, number, (Segment(0, 10),), 10)
    return encode(Item.FRAME, header) + bytes(10 + TRAILER_BYTES)


def test_k2_senders_that_were_never_paired_leave_nothing_in_a_receiver() -> None:
    receiver = TcpReceiver(BytesMemory(1000), RECEIVER_INCARNATION, EventLog().post)
    host, _, port = receiver.endpoint.address.rpartition(":")
    for number in range(NUM_UNKNOWN // 40):
        with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
            read_challenge(sock)
            hello = Hello(WorkerId(f"w{number}"), Incarnation(number), RECEIVER_INCARNATION, True, 0, NO_PROOF)
            sock.sendall(encode(Item.HELLO, hello))
            assert "proof" in (read_welcome(sock).refusal or "")
    receiver.close()
    acceptor = receiver._acceptor
    assert (acceptor._open, acceptor._by_name, receiver._strangers) == (set(), {}, {})
    assert receiver.refused.counts() == {Refusal.NOT_PAIRED: NUM_UNKNOWN // 40}


# --- K3 ----------------------------------------------------------------------------------------------------------

RUNS_WHAT_IT_READS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "xmlrpc", "yaml"}


def test_k3_nothing_here_can_run_what_it_reads() -> None:
    root = Path(disagg.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                names = {"pickle"}
            elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                names = (
                    {"pickle"} if not (isinstance(node.value, ast.Constant) and node.value.value is False) else set()
                )
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                names = {"pickle"}
            else:
                continue
            found += [f"{path.relative_to(root)}:{node.lineno}"] if names & RUNS_WHAT_IT_READS else []
    assert found == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-7.example.org", ""])
def test_k3_a_socket_that_others_can_reach_needs_keys(host: str) -> None:
    def worker(keys: str) -> WorkerConfig:
        return WorkerConfig(
            model="m", served_name="m", role=Role.MIXED, worker_id="w", router_address="h:1", host=host, keys=keys
        )

    with pytest.raises(ConfigurationError, match=r"--keys|no address"):
        worker("")
    with pytest.raises(ConfigurationError, match=r"--control-host .*--keys"):
        RouterConfig(models=(("m", "/m"),), control_host=host)
    RouterConfig(models=(("m", "/m"),), control_host=host, keys="/keys")
    if host in ("10.1.2.3", "node-7.example.org"):
        assert worker("/keys").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_k3_loopback_needs_none(host: str) -> None:
    RouterConfig(models=(("m", "/m"),), control_host=host)


def test_k3_defaults_are_loopback() -> None:
    for kind in (WorkerConfig, RouterConfig):
        hosts = [f.default for f in msgspec.structs.fields(kind) if f.name in ("host", "control_host")]
        assert hosts
        assert all(is_loopback(str(host)) for host in hosts)


def test_k3_the_command_says_so_in_one_line_and_ends(tiny_llama: Path) -> None:
    arguments = [sys.executable, "-m", "disagg", "router", "--model", f"m={tiny_llama}", "--control-host", "0.0.0.0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "disagg keys" in ended.stderr
