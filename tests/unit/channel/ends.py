"""Two ends of a channel over a real socket, and a raw end that can say anything."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from disagg.channel.channel import Channel, dial
from disagg.channel.listening import listen
from disagg.protocol.messages import WorkerToWorker

DEADLINE_S = 20.0
DECODER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)


class Heard:
    """What one end was told, in order; waits have a deadline."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self._changed = asyncio.Event()

    def on_message(self, message: Any) -> None:
        self.log.append(("message", message))
        self._changed.set()

    def on_lost(self, reason: str) -> None:
        self.log.append(("lost", reason))
        self._changed.set()

    @property
    def messages(self) -> list[Any]:
        return [what for kind, what in self.log if kind == "message"]

    @property
    def losses(self) -> list[str]:
        return [what for kind, what in self.log if kind == "lost"]

    async def wait(self, num_messages: int = 0, num_losses: int = 0) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.messages) < num_messages or len(self.losses) < num_losses:
                self._changed.clear()
                await self._changed.wait()


def start(channel: Channel[Any], *, interval_s: float = 60.0) -> Heard:
    heard = Heard()
    channel.start(beat_interval_s=interval_s, on_message=heard.on_message, on_lost=heard.on_lost)
    return heard


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[str, asyncio.Queue[Channel[WorkerToWorker]]]]:
    """An address, and the channels of those who connected to it. All are closed at the end."""
    accepted: asyncio.Queue[Channel[WorkerToWorker]] = asyncio.Queue()
    all_channels: list[Channel[WorkerToWorker]] = []

    async def serve(channel: Channel[WorkerToWorker]) -> None:
        all_channels.append(channel)
        accepted.put_nowait(channel)

    server = await listen("127.0.0.1", 0, DECODER, serve)
    try:
        yield server.address, accepted
    finally:
        server.close()
        for channel in all_channels:
            await channel.close(flush_timeout_s=0.1)
        await server.wait_closed()


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[tuple[Channel[WorkerToWorker], Channel[WorkerToWorker]]]:
    """(dialling end, accepting end), not started."""
    async with served() as (address, accepted):
        one = await dial(address, DECODER, timeout_s=DEADLINE_S)
        try:
            async with asyncio.timeout(DEADLINE_S):
                other = await accepted.get()
            yield one, other
        finally:
            await one.close(flush_timeout_s=0.1)


@contextlib.asynccontextmanager
async def raw() -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader, Channel[WorkerToWorker]]]:
    """A peer that writes bytes, and the channel that reads them, not started."""
    async with served() as (address, accepted):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(DEADLINE_S):
                channel = await accepted.get()
            yield writer, reader, channel
        finally:
            writer.transport.abort()


def frame(payload: bytes, number: int = 0) -> bytes:
    """As the number-th frame of its direction."""
    return len(payload).to_bytes(4) + zlib.crc32(payload, number).to_bytes(4) + payload
