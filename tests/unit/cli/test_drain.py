"""`disagg drain` against a router that the test plays: what it asks, and one plain line for every answer."""

import contextlib
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterator

import msgspec
import pytest

from disagg.cli.main import main
from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import WorkerId
from disagg.protocol.messages import AnswerDrain, Beat, RequestDrain, WorkerToRouter

DEADLINE_S = 20.0


class Router:
    """Takes one connection, reads one frame, sends these bytes and closes."""

    def __init__(self, answer: bytes) -> None:
        self.heard: list[WorkerToRouter] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(DEADLINE_S)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(DEADLINE_S)
            num_bytes, _ = struct.unpack("!II", stream.read(8))
            payload = stream.read(num_bytes)
            self.heard.append(msgspec.msgpack.decode(payload, type=WorkerToRouter))
            connection.sendall(self._answer)

    def close(self) -> None:
        self._thread.join(DEADLINE_S)
        self._socket.close()


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("!II", len(payload), zlib.crc32(payload)) + payload


@contextlib.contextmanager
def router(answer: bytes) -> Iterator[Router]:
    made = Router(answer)
    try:
        yield made
    finally:
        made.close()


def drain(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", "drain", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_worker_is_named_to_the_router(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with router(frame(AnswerDrain())) as played:
        assert drain(monkeypatch, "decode-1", "--router-address", played.address) == 0
    assert played.heard == [RequestDrain(WorkerId("decode-1"))]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "disagg: decode-1 drains and then ends\n")


REFUSAL = AnswerDrain(Failure(FailureKind.INVALID_REQUEST, "no worker x is registered here; there is d0"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (frame(REFUSAL), "disagg: no worker x is registered here; there is d0"),
        (frame(Beat(2.5)), "answered with Beat"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "name it with --router-address"),  # the port next to it
        (b"", "its connection ended; name it with --router-address"),
    ],
)
def test_every_other_answer_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes, said: str
) -> None:
    with router(answer) as played:
        assert drain(monkeypatch, "x", "--router-address", played.address) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_without_a_router_the_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert drain(monkeypatch, "x", "--router-address", f"127.0.0.1:{free_port}") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"disagg: the router's control port: 127.0.0.1:{free_port} cannot be reached")
    assert captured.err.count("\n") == 1
