"""A live service behind the router's own server, with a worker and clients that the test plays."""

import asyncio
import json
import socket
import ssl
from collections.abc import Sequence

import msgspec
from starlette.types import ASGIApp
from tests.unit.worker.rigs import layout, until

from disagg.channel.channel import Channel
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, TokenLogprobs
from disagg.core.roles import Numerics, Role
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import AbortSequence, EmitTokens, RouterToWorker, StartSequence
from disagg.router.connection import ClientConnection
from disagg.router.server import HttpServer
from disagg.router.service import LiveService

MAX_CONTEXT = 10_000
TO_WORKER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)


def card(digest: str, vocab_size: int) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId("m0"),
        incarnation=Incarnation(1),
        role=Role.MIXED,
        pool=PoolCard("tiny", "weights", digest, Numerics.EXACT, vocab_size, MAX_CONTEXT),
        layout=layout(),
        num_blocks=1 << 20,
        control_address="127.0.0.1:1",
        data_endpoints=(Endpoint(TransportKind.TCP, "127.0.0.1:1"),),
    )


class PlayedWorker:
    """Writes the same answer, over and over, for whoever asks: a token for everybody with each step."""

    def __init__(self, channel: Channel[RouterToWorker], answer: Sequence[int]) -> None:
        self.answer = answer
        self.sent: dict[SequenceId, int] = {}  # tokens, by sequences that are open
        self.aborted: list[SequenceId] = []
        self._sampling: dict[SequenceId, SamplingParams] = {}
        self._channel = channel
        channel.start(beat_interval_s=2.5, on_message=self._take, on_lost=lambda reason: None)

    def _take(self, message: RouterToWorker) -> None:
        if isinstance(message, StartSequence):
            self._sampling[message.spec.sequence_id] = message.spec.sampling
            self.sent[message.spec.sequence_id] = 0
        elif isinstance(message, AbortSequence):
            self.aborted.append(message.sequence_id)
            self.sent.pop(message.sequence_id, None)

    def step(self) -> None:
        self._channel.send(EmitTokens(tuple(self._next(each) for each in tuple(self.sent))))

    def finish(self) -> None:
        """All that is left, in one go."""
        while self.sent:
            self.step()

    def _next(self, sequence_id: SequenceId) -> EmittedToken:
        position, sampling = self.sent[sequence_id], self._sampling[sequence_id]
        token_id = self.answer[position % len(self.answer)]
        self.sent[sequence_id] += 1
        if self.sent[sequence_id] == sampling.max_tokens:
            del self.sent[sequence_id]
        logprobs = None if sampling.num_logprobs is None else TokenLogprobs(-0.5, ((token_id, -0.5),))
        return EmittedToken(sequence_id, position, token_id, logprobs)


class Place:
    """All of it, in one process."""

    def __init__(
        self,
        service: LiveService,
        worker: PlayedWorker,
        app: ASGIApp,
        server: HttpServer,
        port: int,
        trusting: ssl.SSLContext | None,
    ) -> None:
        self.service = service
        self.worker = worker
        self.app = app
        self.port = port
        self.trusting = trusting  # what its clients need where it speaks HTTPS
        self._server = server

    @property
    def connection(self) -> ClientConnection:
        """Of the only client."""
        (connection,) = self._server.server_state.connections
        assert isinstance(connection, ClientConnection)
        return connection

    @property
    def has_clients(self) -> bool:
        return bool(self._server.server_state.connections)

    async def has_open(self, count: int) -> None:
        await until(lambda: len(self.worker.sent) == count)


class RawClient:
    """Asks over a socket that takes little of what it does not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._got = b""

    @classmethod
    async def ask(cls, place: Place, path: str, **fields: object) -> "RawClient":
        """fields: of the body; `connection`: the header, "close" where it is not given."""
        connection = fields.pop("connection", "close")
        connected = socket.socket()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connected.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", place.port))
        host = "127.0.0.1" if place.trusting else None
        reader, writer = await asyncio.open_connection(
            sock=connected, limit=2048, ssl=place.trusting, server_hostname=host
        )
        if place.trusting:  # it would read hundreds of kilobytes ahead
            writer.transport.set_read_buffer_limits(high=2048)  # type: ignore[attr-defined]
        content = json.dumps(asked(path, fields)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return cls(reader, writer)

    async def token(self) -> None:
        """Read one more chunk with text."""
        self._got += await self._reader.readuntil(b'"finish_reason":null')

    async def rest(self) -> list[str]:
        """All events, when the answer is over."""
        self._got += await self._reader.read()
        self._writer.close()
        return events_of(self._got)

    def ask_ahead(self) -> None:
        """Another request before the first one is answered."""
        self._writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")

    def leave(self) -> None:
        self._writer.transport.abort()


def asked(path: str, fields: dict[str, object]) -> dict[str, object]:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": "tiny", "stream": True, **prompt, **fields}


def events_of(raw: bytes) -> list[str]:
    """Of a response in chunked encoding, which must be in order to the last byte."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    parts: list[bytes] = []
    while rest:
        size, line_end, rest = rest.partition(b"\r\n")
        part, rest = rest[: int(size, 16)], rest[int(size, 16) :]
        assert (line_end, rest[:2]) == (b"\r\n", b"\r\n")
        parts.append(part)
        rest = rest[2:]
    assert parts[-1] == b""
    assert all(parts[:-1])
    return [each for each in b"".join(parts).decode().split("\n\n") if each]
