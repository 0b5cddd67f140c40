"""Who may connect, how many, and for how long without saying who they are."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.channel.ends import DEADLINE_S, DECODER, frame
from tests.unit.transport.rigs import open_descriptors

from disagg.channel import listening
from disagg.channel.channel import MAX_FIRST_FRAME_BYTES, Channel, dial
from disagg.channel.keys import Keys, load_keys
from disagg.channel.listening import Listener, listen
from disagg.channel.tally import Refusal
from disagg.cluster.authority import make_keys
from disagg.core.errors import PeerFault, PeerLost
from disagg.protocol.messages import Beat


@pytest.fixture(autouse=True)
async def no_socket_left() -> AsyncIterator[None]:
    before = open_descriptors()
    yield
    async with asyncio.timeout(DEADLINE_S):
        while open_descriptors() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder: Path = tmp_path_factory.mktemp("keys")
    make_keys(folder, ("localhost",), days=1)
    loaded = load_keys(str(folder / "localhost"))
    assert loaded is not None
    return loaded


class Door:
    """Hears one message of everybody, and keeps them."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.channels: list[Channel[Any]] = []

    async def serve(self, channel: Channel[Any]) -> None:
        try:
            self.heard.put_nowait(await channel.receive(DEADLINE_S))
            self.channels.append(channel)
        except PeerFault as error:
            self.heard.put_nowait(error)
            await channel.close()

    async def next(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await self.heard.get()


@contextlib.asynccontextmanager
async def door(
    tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", **limits: int
) -> AsyncIterator[tuple[Door, Listener]]:
    made = Door()
    listener = await listen(host, 0, DECODER, made.serve, tls=tls, **limits)
    try:
        yield made, listener
        listener.check_invariants()
    finally:
        listener.close()
        await listener.wait_closed()
        for channel in made.channels:
            await channel.close(flush_timeout_s=0.1)


async def connect(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listener.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(OSError):
            return await reader.read(1) == b""
    return True


async def test_one_connection_too_many_is_closed_at_once_and_counted() -> None:
    async with door(max_connections=2) as (made, listener):
        kept = [await dial(listener.address, DECODER, timeout_s=DEADLINE_S) for _ in range(2)]
        for channel in kept:
            channel.send(Beat(1.0))
            assert await made.next() == Beat(1.0)
        reader, writer = await connect(listener)
        assert await is_closed(reader)
        writer.transport.abort()
        assert listener.refused.counts() == {Refusal.FULL: 1}
        await kept[0].close()
        await made.channels[0].close()
        again = await dial(listener.address, DECODER, timeout_s=DEADLINE_S)
        again.send(Beat(2.0))
        assert await made.next() == Beat(2.0)
        for channel in (kept[1], again):
            await channel.close()


async def test_the_oldest_stranger_makes_room_for_the_next() -> None:
    async with door(max_strangers=2) as (made, listener):
        strangers = [await connect(listener) for _ in range(3)]
        assert await is_closed(strangers[0][0])
        assert listener.num_strangers == 2
        assert listener.refused.counts() == {Refusal.FULL: 1}
        payload = msgspec.msgpack.encode(Beat(3.0))
        strangers[1][1].write(frame(payload))
        assert await made.next() == Beat(3.0)
        for _, writer in strangers:
            writer.transport.abort()


async def test_a_long_first_frame_is_refused_before_it_is_read() -> None:
    async with door() as (made, listener):
        reader, writer = await connect(listener)
        writer.write((MAX_FIRST_FRAME_BYTES + 1).to_bytes(4))
        assert str(MAX_FIRST_FRAME_BYTES) in str(await made.next())
        assert await is_closed(reader)
        assert listener.refused.counts() == {Refusal.GARBAGE: 1}
        writer.transport.abort()


async def test_whoever_stops_inside_the_tls_handshake_is_let_go(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "TLS_TIMEOUT_S", 0.1)
    async with door(keys.accepting) as (_, listener):
        reader, writer = await connect(listener)
        writer.write(b"\x16\x03\x01\x02\x00")  # the head of a handshake record, and no more
        assert await is_closed(reader)
        writer.transport.abort()
        assert listener.refused.counts() == {Refusal.NO_TLS: 1}


async def test_under_tls_messages_pass_and_plain_ones_do_not(keys: Keys) -> None:
    async with door(keys.accepting) as (made, listener):
        channel = await dial(listener.address, DECODER, timeout_s=DEADLINE_S, tls=keys.dialling)
        channel.send(Beat(4.0))
        assert await made.next() == Beat(4.0)
        await channel.close()
        plain = await dial(listener.address, DECODER, timeout_s=DEADLINE_S)
        plain.send(Beat(5.0))
        with pytest.raises(PeerLost):
            await plain.receive(DEADLINE_S)
        await plain.close()
    async with door() as (_, listener):
        with pytest.raises(PeerLost, match=r"--keys|ended|broke|reached"):
            await dial(listener.address, DECODER, timeout_s=1.0, tls=keys.dialling)


async def test_a_certificate_of_another_host_is_not_trusted(tmp_path: Path) -> None:
    make_keys(tmp_path, ("localhost",), days=1)
    loaded = load_keys(str(tmp_path / "localhost"))
    assert loaded is not None
    async with door(loaded.accepting, host="127.0.0.2") as (_, listener):
        with pytest.raises(PeerLost, match="not trusted"):
            await dial(listener.address, DECODER, timeout_s=DEADLINE_S, tls=loaded.dialling)


async def test_closing_lets_strangers_go_at_once() -> None:
    async with door() as (_, listener):
        reader, writer = await connect(listener)
        async with asyncio.timeout(DEADLINE_S):
            while listener.num_strangers == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        listener.close()
        assert await is_closed(reader)
        writer.transport.abort()
