"""Class B over HTTP: clients that close their sockets anywhere (B3), requests that are refused (B2)."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.e2e.api_paths import PATIENT
from tests.e2e.cluster import MAX_TRIES, SMALL, Front, completion, standing_still

from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    arguments = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--chunk-tokens", "8")
    with Serve((str(tiny_llama), *arguments, *PATIENT, *SMALL)) as running:
        yield running


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    with Front(serve.url) as front:
        front.wait_idle(2)
        yield front


class Leave(NamedTuple):
    """How far a client goes before it closes its socket."""

    num_sent: float = 1.0  # share of the request's bytes
    until: bytes = b""  # of the response
    num_more: int = 0  # bytes after that
    is_reset: bool = False
    stream: bool = True


LEAVES = (
    Leave(0.0),
    Leave(0.02),
    Leave(0.3),
    Leave(0.99),
    Leave(1.0),
    Leave(1.0, is_reset=True),
    Leave(1.0, stream=False),
    Leave(1.0, b"HTTP/1.1"),
    Leave(1.0, b"\r\n\r\n", is_reset=True),
    Leave(1.0, b"data: ", 1),
    Leave(1.0, b"data: ", 30, is_reset=True),
    Leave(1.0, b'"choices"', 900),
)


def leave(url: str, body: dict[str, Any], how: Leave, at_end: Callable[[], object]) -> None:
    """at_end: called just before the socket is closed."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({**body, "stream": how.stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    with socket.create_connection((host, int(port)), 10.0) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.sendall(data[: round(len(data) * how.num_sent)])
        seen = b""
        while how.until and (how.until not in seen or len(seen.partition(how.until)[2]) < how.num_more):
            got = sock.recv(256)
            assert got, f"the connection ended before {how.until!r}: {seen!r}"
            seen += got
        at_end()
        if how.is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", LEAVES, ids=str)
def test_b3_client_closes_its_socket_anywhere_and_no_block_is_kept(serve: Serve, front: Front, how: Leave) -> None:
    """The lease is not waited for. The answer does not end first: its writer stands still."""
    writer = serve.pid_of("decode-0")
    salt = 3 + LEAVES.index(how)
    prompt = [salt, *(3 + index % 300 for index in range(400))]
    seen = front.readings()
    for _ in range(MAX_TRIES):
        before = front.readings()
        with contextlib.ExitStack() as still:
            body = completion("tiny-llama", prompt, 280)
            leave(front.url, body, how, partial(still.enter_context, standing_still(writer)))
            wait_until(lambda: not front.cluster().router.num_open_requests, TIMEOUT_S, "the router to let go of it")
        front.wait_idle(2, TIMEOUT_S)
        seen = front.readings().since(before)
        if not seen.total(table.REQUESTS, outcome="finished"):
            break  # an answer that was over before its writer stood still proves nothing
    assert seen.total(table.REQUESTS, outcome="failed") == 0
    assert seen.total(table.REQUESTS, outcome="finished") == 0, "it was not cut short: nothing is proven"
    assert seen.total(table.REQUESTS, outcome="aborted") == 1 or not how.until
    assert seen.total(table.MOVES) == 0
    assert len(front.complete("tiny-llama", [5, 6, 7], 5)[0].tokens) == 5


@pytest.mark.parametrize(
    "more",
    [
        {"model": "nobody"},
        {"prompt": []},
        {"prompt": [3] * 3000},
        {"prompt": [10**6]},
        {"max_tokens": 10**7},
        {"temperature": -1},
        {"top_p": 7},
        {"n": -1},
        {"stop": ["a"] * 100},
        {"messages": "not a list"},
        {"messages": [{"role": "user"}]},
    ],
    ids=str,
)
def test_b2_a_bad_request_over_http_reaches_no_worker(front: Front, more: dict[str, Any]) -> None:
    """Also a chat whose template cannot be rendered."""
    before = front.readings()
    body = completion("tiny-llama", [5, 6, 7], 5)
    if "messages" in more:
        response = front.post({"model": "tiny-llama", **more}, "/v1/chat/completions")
    else:
        response = front.post({**body, **more})
    assert 400 <= response.status_code < 500, response.text
    assert "error" in response.json()
    assert front.readings().since(before).total(table.PLACEMENTS) == 0
    assert front.is_idle(2)
