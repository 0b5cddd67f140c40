"""The rig by itself: a script is its seed's alone; a link does to bytes what it is told and leaves nothing behind."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from disagg.channel.channel import encode_frame, frame_checksum
from disagg.core.errors import InternalFault
from disagg.testing.fault_script import (
    DURATIONS_S,
    LINK_FAULTS,
    LINK_KINDS,
    PROCESS_KINDS,
    REST_S,
    ROUTER,
    Fault,
    FaultKind,
    FaultPlayer,
    Target,
    draw_script,
)
from disagg.testing.faulty_link import WORKS, FaultyLink, LinkFaults, LinkKind
from disagg.testing.processes import wait_until
from disagg.transport.wire import NO_PROOF, PROBE, FrameHeader, Item, encode, encode_trailer

DEADLINE_S = 30.0
LINKS = [("p0", ROUTER), ("d0", ROUTER), ("p0", "d0")]


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        await asyncio.sleep(0.001)


# --- scripts ----------------------------------------------------------------------------------------------------


def script(seed: int, links: list[tuple[str, str]] = LINKS) -> tuple[Fault, ...]:
    return draw_script(random.Random(seed), duration_s=200.0, mean_gap_s=1.0, workers=["p0", "d0"], links=links)


def test_a_script_is_its_seeds_alone() -> None:
    assert script(1) == script(1)
    assert script(1) != script(2)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_and_no_target_is_broken_twice_at_once(seed: int) -> None:
    faults = script(seed)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    free_at_s: dict[Target, float] = {}
    for fault in faults:
        assert 0 <= fault.at_s < 200.0
        least_s, most_s = DURATIONS_S[fault.kind]
        assert least_s <= fault.duration_s <= most_s
        assert bool(fault.target.peer) == (fault.kind in LINK_KINDS)
        assert fault.kind is not FaultKind.KV_CORRUPTED or fault.target.peer != ROUTER
        assert fault.at_s >= free_at_s.get(fault.target, 0.0)
        free_at_s[fault.target] = fault.at_s + fault.duration_s + REST_S


def test_without_links_only_processes_are_broken() -> None:
    assert {fault.kind for fault in script(1, links=[])} == set(PROCESS_KINDS)
    assert LINK_FAULTS.keys() == set(LINK_KINDS)


class Recorder:
    """A cluster that only notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.links: dict[tuple[str, str], LinkFaults] = {}

    def kill(self, name: str, number: int) -> int:
        if name == "gone":
            raise InternalFault("it does not run")
        self.done.append((name, number))
        return 1

    def set_link(self, worker: str, peer: str, faults: LinkFaults) -> None:
        self.links[worker, peer] = faults


async def test_a_cancelled_script_ends_what_is_under_way() -> None:
    recorder = Recorder()
    faults = [
        Fault(0.0, FaultKind.LINK_CUT, Target("p0", "d0"), 60.0),
        Fault(0.0, FaultKind.LONG_STOP, Target("d0"), 60.0),
        Fault(0.0, FaultKind.KILL, Target("gone"), 0.0),
        Fault(60.0, FaultKind.KILL, Target("p0"), 0.0),
    ]
    player = FaultPlayer(recorder, faults)
    playing = asyncio.create_task(player.play())
    await until(lambda: sum(player.played.values()) == 2)
    player.check_invariants()
    assert recorder.links == {("p0", "d0"): LinkFaults(is_cut=True)}
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing
    assert recorder.links == {("p0", "d0"): WORKS}
    assert [number.name for _, number in recorder.done] == ["SIGSTOP", "SIGCONT"]
    assert player.played == {FaultKind.LINK_CUT: 1, FaultKind.LONG_STOP: 1}
    assert player.num_running == 0


# --- links ------------------------------------------------------------------------------------------------------


class Far:
    """What stands upstream of a link: it keeps the bytes of its connections and can answer."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.writers: list[asyncio.StreamWriter] = []
        self.num_ended = 0
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.received += data
                self._changed.set()
        self.num_ended += 1
        self._changed.set()
        writer.close()

    async def until(self, num_bytes: int = 0, num_ended: int = 0) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.received) < num_bytes or self.num_ended < num_ended:
                self._changed.clear()
                await self._changed.wait()
        return bytes(self.received)


@contextlib.asynccontextmanager
async def linked(kind: LinkKind = LinkKind.CONTROL) -> AsyncIterator[tuple[FaultyLink, Far]]:
    before = asyncio.all_tasks()
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    link = FaultyLink("a>b", kind, random.Random(1), upstream=f"{host}:{port}")
    try:
        yield link, far
        link.check_invariants()
    finally:
        await link.close()
        await link.close()
        server.close()
        for writer in far.writers:
            writer.transport.abort()
    link.check_invariants()
    with pytest.raises(ConnectionRefusedError):
        await dialled(link)
    await until(lambda: not asyncio.all_tasks() - before)


async def dialled(link: FaultyLink) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = link.address.split(":")
    return await asyncio.open_connection(host, int(port))


PAYLOADS = [b"one", b"", b"three" * 1000]
FRAMES = b"".join(encode_frame(payload, number) for number, payload in enumerate(PAYLOADS))


async def test_a_link_that_works_changes_no_byte_either_way() -> None:
    async with linked() as (link, far):
        reader, writer = await dialled(link)
        for byte in FRAMES[:20]:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(FRAMES[20:])
        assert await far.until(len(FRAMES)) == FRAMES
        far.writers[0].write(FRAMES)
        assert await reader.readexactly(len(FRAMES)) == FRAMES
        writer.close()
        await far.until(num_ended=1)
        assert link.counts.num_units == 2 * len(PAYLOADS)


def frames_in(data: bytes) -> list[tuple[bytes, bool]]:
    """(payload, whether its checksum holds) of each frame."""
    found: list[tuple[bytes, bool]] = []
    while data:
        length, checksum = int.from_bytes(data[:4]), int.from_bytes(data[4:8])
        payload, data = data[8 : 8 + length], data[8 + length :]
        found.append((payload, frame_checksum(payload, len(found)) == checksum))
    return found


async def test_a_repeat_is_a_message_like_any_other() -> None:
    async with linked() as (link, far):
        link.set(LinkFaults(duplicate_share=1.0))
        _, writer = await dialled(link)
        writer.write(FRAMES)
        got = frames_in(await far.until(2 * len(FRAMES)))
        assert got == [(payload, True) for payload in PAYLOADS for _ in range(2)]
        assert link.counts.num_duplicated == len(PAYLOADS)
        writer.close()


async def test_a_loss_is_seen_at_the_next_frame() -> None:
    async with linked() as (link, far):
        _, writer = await dialled(link)
        link.set(LinkFaults(drop_share=1.0))
        writer.write(encode_frame(b"lost", 0))
        await until(lambda: link.counts.num_dropped > 0)
        link.set(WORKS)
        writer.write(encode_frame(b"next", 1))
        assert frames_in(await far.until(12)) == [(b"next", False)]
        writer.close()


async def test_a_damaged_message_differs_in_one_bit() -> None:
    async with linked() as (link, far):
        link.set(LinkFaults(corrupt_share=1.0))
        _, writer = await dialled(link)
        frame = encode_frame(b"x" * 500, 0)
        writer.write(frame)
        got = await far.until(len(frame))
        assert sum((a ^ b).bit_count() for a, b in zip(got, frame, strict=True)) == 1
        writer.close()


async def test_only_the_payload_of_a_push_is_damaged_and_only_so_often() -> None:
    payload = random.Random(2).randbytes(200_000)
    header = encode(Item.FRAME, FrameHeader(PROBE, 0, b"", b"", len(payload), NO_PROOF))
    push = header + payload + encode_trailer(7)
    async with linked(LinkKind.DATA) as (link, far):
        link.set(LinkFaults(num_corrupt_pushes=1))
        _, writer = await dialled(link)
        writer.write(push + push)
        got = await far.until(2 * len(push))
        wrong = [index for index, (a, b) in enumerate(zip(got, push + push, strict=True)) if a != b]
        assert len(wrong) == 1
        assert len(header) <= wrong[0] < len(header) + len(payload)
        assert link.counts.num_units == 2
        writer.close()


async def test_silence_keeps_everything_back_and_lets_it_go_later() -> None:
    """Nothing arrives, not even an end; whoever connects meanwhile is accepted and hears nothing."""
    async with linked() as (link, far):
        _, first = await dialled(link)
        first.write(FRAMES)
        await far.until(len(FRAMES))
        link.set(LinkFaults(is_silent=True))
        link.check_invariants()
        first.write(encode_frame(b"late", 3))
        first.close()
        reader, second = await dialled(link)
        second.write(FRAMES)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(1)
        assert len(far.received) == len(FRAMES)
        assert far.num_ended == 0
        assert len(far.writers) == 1
        link.set(WORKS)
        await far.until(2 * len(FRAMES) + 12, num_ended=1)
        second.close()


async def test_a_cut_closes_and_refuses_until_it_is_lifted() -> None:
    async with linked() as (link, far):
        address = link.address
        reader, writer = await dialled(link)
        writer.write(FRAMES)
        await far.until(len(FRAMES))
        link.set(LinkFaults(is_cut=True))
        link.check_invariants()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        await far.until(num_ended=1)
        with pytest.raises(ConnectionRefusedError):
            await dialled(link)
        link.set(WORKS)
        assert link.address == address
        _, again = await dialled(link)
        again.write(FRAMES)
        await far.until(2 * len(FRAMES))
        assert link.counts.num_cut == 1
        writer.close()
        again.close()


async def test_a_delay_is_one_of_each_message_not_of_their_sum() -> None:
    async with linked() as (link, far):
        link.set(LinkFaults(delay_s=0.1))
        _, writer = await dialled(link)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for number in range(200):
            writer.write(encode_frame(b"", number))
        await far.until(200 * 8)
        assert 0.1 <= loop.time() - start_s < 0.5 * 200 * 0.1
        writer.close()


async def test_a_narrow_link_takes_its_time() -> None:
    async with linked() as (link, far):
        link.set(LinkFaults(bytes_per_s=100_000.0))
        _, writer = await dialled(link)
        start_s = asyncio.get_running_loop().time()
        writer.write(b"".join(encode_frame(bytes(992), number) for number in range(20)))
        await far.until(20_000)
        assert asyncio.get_running_loop().time() - start_s >= 0.15
        writer.close()


async def test_without_anybody_upstream_the_connection_ends() -> None:
    async with linked() as (link, _):
        link.upstream = "127.0.0.1:1"
        reader, writer = await dialled(link)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()


# --- waiting ----------------------------------------------------------------------------------------------------


def test_what_is_true_at_the_end_of_a_wait_counts_however_late_that_is_seen() -> None:
    """The look before was held up for longer than the whole wait was to take."""
    looks: list[float] = []

    def is_so() -> bool:
        looks.append(time.monotonic())
        if len(looks) == 1:
            time.sleep(0.1)
        return len(looks) > 1

    wait_until(is_so, 0.05, "the second look")
    assert len(looks) == 2
    with pytest.raises(InternalFault, match=r"waited 0\.01 s for never"):
        wait_until(lambda: False, 0.01, "never")
