"""Control connections on loopback: order, every way to be lost, and what is left afterwards."""

import asyncio
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest
from tests.unit.channel.ends import DEADLINE_S, DECODER, frame, joined, raw, start

from disagg.channel import channel as channel_module
from disagg.channel.channel import MAX_FIRST_FRAME_BYTES, MAX_FRAME_BYTES, dial
from disagg.core.errors import PeerLost, ProtocolViolation
from disagg.core.ids import HandoffId, Incarnation, RequestId, SequenceId
from disagg.protocol.messages import Beat, RegisterWorker, RenewLeases


def renewal(number: int) -> RenewLeases:
    return RenewLeases((HandoffId(SequenceId(RequestId(Incarnation(1), number), 0), 1),), 5.0)


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    """Whatever a test does, its channels' tasks end."""
    yield
    me = asyncio.current_task()
    async with asyncio.timeout(DEADLINE_S):
        while others := [task for task in asyncio.all_tasks() if task is not me and "Channel" in repr(task.get_coro())]:
            await asyncio.wait(others)


async def test_messages_come_in_order_in_both_directions_and_beats_stay_inside() -> None:
    async with joined() as (one, other):
        heard_one, heard_other = start(one), start(other)
        for number in range(50):
            one.send(renewal(number))
            other.send(renewal(100 + number))
            if number % 10 == 0:
                for end in (one, other):
                    end.send(Beat(2.5))
                await asyncio.sleep(0)
        await heard_other.wait(num_messages=50)
        await heard_one.wait(num_messages=50)
        assert heard_other.messages == [renewal(number) for number in range(50)]
        assert heard_one.messages == [renewal(100 + number) for number in range(50)]
        assert heard_one.losses == heard_other.losses == []


async def test_the_first_message_is_awaited_and_the_rest_waits_for_start() -> None:
    async with joined() as (one, other):
        for number in range(3):
            one.send(renewal(number))
        assert await other.receive(DEADLINE_S) == renewal(0)
        heard = start(other)
        await heard.wait(num_messages=2)
        assert heard.messages == [renewal(1), renewal(2)]


async def test_silence_before_the_first_message_is_a_loss() -> None:
    async with joined() as (_, other):
        with pytest.raises(PeerLost, match=r"sent nothing for 0\.02 s"):
            await other.receive(0.02)


async def test_the_end_of_the_stream_is_told_once() -> None:
    async with joined() as (one, other):
        heard = start(other)
        one.send(renewal(1))
        await one.close()
        await heard.wait(num_losses=1)
        assert heard.messages == [renewal(1)]
        assert "its connection" in heard.losses[0]
        assert not other.is_open
        other.send(renewal(2))  # no effect, no error
        await other.close()
        await other.close()
        assert len(heard.losses) == 1


GOOD = msgspec.msgpack.encode(renewal(1))
GARBAGE = {
    "a length over the limit": (MAX_FRAME_BYTES + 1).to_bytes(4),
    "the largest length": b"\xff" * 4,
    "no msgpack": frame(b"\xc1\xff\x00", 1),
    "an empty frame": frame(b"", 1),
    "an unknown kind": frame(msgspec.msgpack.encode(["shut_down", 1]), 1),
    "a message of another direction": frame(msgspec.msgpack.encode(["register_worker", 1]), 1),
    "a field of another type": frame(msgspec.msgpack.encode(["beat", "soon"]), 1),
    "deep nesting": frame(b"\x91" * 100_000, 1),
    "a damaged frame": frame(GOOD, 1)[:-1] + bytes([GOOD[-1] ^ 1]),
    "a damaged checksum": frame(GOOD, 1 << 8),
    "a frame after a lost one": frame(GOOD, 2),
    "the same frame again": frame(GOOD, 0),
}


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_ends_the_connection_and_nothing_after_it_is_delivered(garbage: str) -> None:
    async with raw() as (writer, reader, channel):
        heard = start(channel)
        writer.write(frame(GOOD) + GARBAGE[garbage] + frame(GOOD, 2))
        await heard.wait(num_losses=1)
        assert heard.messages == [renewal(1)]
        assert len(heard.losses) == 1
        async with asyncio.timeout(DEADLINE_S):
            while await reader_ended(reader):
                pass
        assert len(heard.log) == 2


async def reader_ended(reader: asyncio.StreamReader) -> bool:
    """Read on; False once the other side has closed."""
    try:
        return bool(await reader.read(4096))
    except ConnectionResetError:
        return False


async def test_garbage_instead_of_the_first_message_is_a_violation() -> None:
    async with raw() as (writer, _, channel):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ProtocolViolation, match=str(MAX_FIRST_FRAME_BYTES)):
            await channel.receive(DEADLINE_S)


async def test_half_a_frame_and_the_end_is_a_loss() -> None:
    async with raw() as (writer, _, channel):
        heard = start(channel)
        writer.write(frame(msgspec.msgpack.encode(renewal(1)))[:-3])
        writer.close()
        await heard.wait(num_losses=1)
        assert len(heard.log) == 1
        assert "its connection" in heard.losses[0]


async def test_a_reset_is_a_loss() -> None:
    async with raw() as (writer, _, channel):
        heard = start(channel)
        writer.transport.abort()
        await heard.wait(num_losses=1)
        assert len(heard.log) == 1


async def test_silence_is_a_loss_with_its_length() -> None:
    async with raw() as (_, _reader, channel):
        heard = start(channel, interval_s=0.025)
        await heard.wait(num_losses=1)
        assert len(heard.log) == 1
        assert "silent" in heard.losses[0]
        assert "0.05 s" in heard.losses[0]


async def test_beats_alone_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One end has nothing to say for many times its peer's patience; time goes on only while the loop turns."""
    now_s = 100.0
    monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with joined() as (one, other):
        start(one, interval_s=0.01)
        heard = start(other, interval_s=0.1)
        for _ in range(150):
            await asyncio.sleep(0.01)
            now_s += 0.01
        assert heard.log == []


async def test_a_peer_that_does_not_read_is_lost_before_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_BUFFERED_BYTES", 1 << 20)
    async with raw() as (_, _reader, channel):
        heard = start(channel)
        _reader._transport.pause_reading()  # type: ignore[attr-defined]
        blob = RenewLeases(renewal(1).handoff_ids * 4000, 5.0)
        largest = 0
        for _ in range(10_000):
            channel.send(blob)
            largest = max(largest, channel._writer.transport.get_write_buffer_size())
            if not channel.is_open:
                break
            await asyncio.sleep(0)
        await heard.wait(num_losses=1)
        assert "has not read" in heard.losses[0]
        assert largest < 2 << 20
        assert len(heard.log) == 1


async def test_a_message_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined() as (one, other):
        heard_one, heard_other = start(one), start(other)
        monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 1000)
        one.send(RenewLeases(renewal(1).handoff_ids * 1000, 5.0))
        await heard_one.wait(num_losses=1)
        assert "exceeds the limit of 1000" in heard_one.losses[0]
        await heard_other.wait(num_losses=1)
        assert heard_other.messages == []


async def test_a_loss_is_never_told_inside_send(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined() as (one, _):
        heard = start(one)
        monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 1000)
        one.send(RenewLeases(renewal(1).handoff_ids * 1000, 5.0))
        assert heard.losses == []
        await heard.wait(num_losses=1)


async def test_an_error_while_a_message_is_handled_is_a_loss() -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)
    async with joined() as (one, other):
        heard = start(other)
        losses: list[str] = []

        def fail(message: object) -> None:
            raise ValueError("a broken invariant")

        one.start(beat_interval_s=60, on_message=fail, on_lost=losses.append)
        other.send(renewal(1))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await heard.wait(num_losses=1)
            assert losses
        finally:
            await one.close()
            gc.collect()  # the task's error is reported now, to the handler above


async def test_closing_flushes_and_tells_nobody_here() -> None:
    async with joined() as (one, other):
        heard_one, heard_other = start(one), start(other)
        for number in range(200):
            one.send(renewal(number))
        await one.close()
        await heard_other.wait(num_messages=200, num_losses=1)
        assert heard_one.log == []


async def test_a_channel_can_be_closed_by_the_message_it_delivers() -> None:
    async with joined() as (one, other):
        closing: list[asyncio.Task[None]] = []
        losses: list[str] = []
        one.start(
            beat_interval_s=60,
            on_message=lambda message: closing.append(asyncio.create_task(one.close())),
            on_lost=losses.append,
        )
        heard = start(other)
        other.send(renewal(1))
        await heard.wait(num_losses=1)
        await asyncio.gather(*closing)
        assert (len(closing), losses) == (1, [])


async def test_nobody_at_an_address_is_a_lost_peer(free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(PeerLost, match=address):
        await dial(address, DECODER, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "127.0.0.1:http", "a..b:9", ""])
async def test_what_is_no_address_is_a_lost_peer_too(address: str) -> None:
    """Another program has said it."""
    with pytest.raises(PeerLost, match="cannot be reached"):
        await dial(address, DECODER, timeout_s=DEADLINE_S)


async def test_addresses_are_told_to_the_operator() -> None:
    async with joined() as (_, other):
        assert other.peer_address.startswith("127.0.0.1:")


def test_the_kinds_of_messages_that_are_sent_here_are_those_of_workers() -> None:
    with pytest.raises(msgspec.DecodeError):
        DECODER.decode(msgspec.msgpack.encode(["register_worker"]))
    assert RegisterWorker.__struct_config__.tag == "register_worker"
