"""Who stood still itself blames nobody: heartbeats after a time in which a whole process, or machine, did not run."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.unit.worker.rigs import DEADLINE_S, until

from disagg.channel.channel import Channel, dial
from disagg.channel.listening import listen
from disagg.protocol.messages import Beat

pytestmark = pytest.mark.usefixtures("no_socket_left")

BEAT_S = 0.1  # a peer silent for two of these is lost
BEATS: msgspec.msgpack.Decoder[Beat] = msgspec.msgpack.Decoder(Beat)


class Ends:
    """Both ends of one connection, and why either was lost."""

    def __init__(self, channels: tuple[Channel[Beat], Channel[Beat]]) -> None:
        self.channels = channels
        self.lost: list[str] = []
        for channel in channels:
            channel.start(beat_interval_s=BEAT_S, on_message=lambda message: None, on_lost=self.lost.append)


@asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[Channel[Beat]] = asyncio.Queue()
    server = await listen("127.0.0.1", 0, BEATS, accepted.put)
    dialled = await dial(server.address, BEATS, timeout_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        ends = Ends((await accepted.get(), dialled))
    try:
        yield ends
    finally:
        server.close()
        for channel in ends.channels:
            await channel.close()


async def test_two_ends_that_stood_still_for_many_beats_are_still_connected() -> None:
    async with connected() as ends:
        for _ in range(5):
            await asyncio.sleep(2.5 * BEAT_S)
            time.sleep(6 * BEAT_S)  # noqa: ASYNC251 - neither end hears or speaks
        await asyncio.sleep(2.5 * BEAT_S)
        assert ends.lost == []


async def test_a_peer_that_is_silent_is_lost_by_one_who_stood_still_too() -> None:
    """What is forgiven is the time that this end lost, and no more."""
    async with connected() as ends:
        await asyncio.sleep(2.5 * BEAT_S)
        ends.channels[0]._tasks[1].cancel()  # beats no more, and hears
        time.sleep(6 * BEAT_S)  # noqa: ASYNC251
        woken_s = time.monotonic()
        await until(lambda: bool(ends.lost))
        assert "silent" in ends.lost[0]
        assert time.monotonic() - woken_s < DEADLINE_S
