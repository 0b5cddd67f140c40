"""Clients that send half a request, stall, stop reading or vanish: each costs its own connection, and that only."""

import asyncio
import contextlib
import gc
import json
import resource
import socket
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from tests.unit.router.site import MakeSite, Site, Tls, listening
from tests.unit.transport.rigs import open_descriptors
from tests.unit.worker.rigs import until

from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.body import BodyLimits
from disagg.router.connection import MAX_HEADER_BYTES, ConnectionLimits
from disagg.testing.generation import Script

DEADLINE_S = 20.0
NUM_CLIENTS = 200
LIMITS = ConnectionLimits(header_timeout_s=0.3, write_timeout_s=0.3, keep_alive_s=0.3)
PATIENT = ConnectionLimits(header_timeout_s=DEADLINE_S, write_timeout_s=0.3, keep_alive_s=0.3)  # until it has asked
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"


def served(site: Site, limits: ConnectionLimits = LIMITS, tls: Tls | None = None) -> AbstractAsyncContextManager[int]:
    return listening(site.app, limits, tls.files if tls else None)


async def connected(
    port: int, tls: Tls | None, over: socket.socket | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if over is None:
        return await asyncio.open_connection("127.0.0.1", port, ssl=tls.trusting if tls else None)
    if tls is None:
        return await asyncio.open_connection(sock=over)
    return await asyncio.open_connection(sock=over, ssl=tls.trusting, server_hostname="127.0.0.1")


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def request(**fields: object) -> bytes:
    content = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def client_of(port: int, tls: Tls | None) -> httpx.AsyncClient:
    url, trusting = (f"https://127.0.0.1:{port}", tls.trusting) if tls else (f"http://127.0.0.1:{port}", True)
    return httpx.AsyncClient(base_url=url, verify=trusting, trust_env=False, timeout=DEADLINE_S)


async def is_served(port: int, tls: Tls | None) -> bool:
    """A good client, too, is let go where this machine holds it up for longer than such limits: then it asks again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                async with client_of(port, tls) as client:
                    answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
                    return answer.status_code == 200


async def answer_to(sent: bytes, port: int, tls: Tls | None, *, is_good: bool) -> bytes:
    """All that comes until the server closes; who is good asks again if that is nothing, as in is_served()."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = b""
            with contextlib.suppress(OSError):
                reader, writer = await connected(port, tls)
                writer.write(sent)
                answer = await until_closed(reader)
                writer.close()
            if answer or not is_good:
                return answer


@pytest.mark.parametrize("sent", [b"", b"P", b"\r\n", HEAD, request() + b"GET /hea"])
async def test_headers_that_do_not_come(make_site: MakeSite, either_scheme: Tls | None, sent: bytes) -> None:
    is_good = len(sent) > len(HEAD)  # the first of two
    async with served(make_site(), tls=either_scheme) as port:
        answer = await answer_to(sent, port, either_scheme, is_good=is_good)
        assert answer.startswith(b"HTTP/1.1 200") == is_good
        assert await is_served(port, either_scheme)


async def test_a_body_that_does_not_come(make_site: MakeSite, either_scheme: Tls | None) -> None:
    limits = ConnectionLimits(keep_alive_s=10 * DEADLINE_S)  # the refusal itself closes the connection
    async with served(make_site(limits=BodyLimits(timeout_s=0.2)), limits, either_scheme) as port:
        reader, writer = await connected(port, either_scheme)
        writer.write(HEAD + b'\r\n{"model":')
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in answer
        writer.close()


async def test_a_body_that_drips_after_its_refusal(make_site: MakeSite, either_scheme: Tls | None) -> None:
    async with served(make_site(limits=BodyLimits(max_bytes=500)), PATIENT, either_scheme) as port:
        reader, writer = await connected(port, either_scheme)
        writer.write(HEAD + b"\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())  # one byte now and then keeps nothing open
        answer = await until_closed(reader)
        dripping.cancel()
        await asyncio.wait({dripping})
        assert b"413" in answer
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03", b"GET /health HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_does_not_come(make_site: MakeSite, tls: Tls, sent: bytes) -> None:
    async with served(make_site(), tls=tls) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert b"HTTP" not in await until_closed(reader)
        writer.close()
        assert await is_served(port, tls)


async def test_a_goodbye_that_is_not_answered(make_site: MakeSite, either_scheme: Tls | None) -> None:
    """The connection is kept for the next request, which does not come, and the client does nothing more."""

    def ask(port: int) -> socket.socket:
        asking = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        if either_scheme is not None:
            asking = either_scheme.trusting.wrap_socket(asking, server_hostname="127.0.0.1")
        asking.sendall(request())
        assert asking.recv(1 << 16).startswith(b"HTTP/1.1 200")
        return asking

    async with served(make_site(), PATIENT, either_scheme) as port:
        before = open_descriptors()
        asking = await asyncio.to_thread(ask, port)
        await until(lambda: len(open_descriptors()) <= len(before) + 1)  # the client's own
        asking.close()


async def test_headers_without_end(make_site: MakeSite, either_scheme: Tls | None) -> None:
    async with served(make_site(), ConnectionLimits(header_timeout_s=DEADLINE_S), either_scheme) as port:
        reader, writer = await connected(port, either_scheme)
        writer.write(HEAD + b"X-Long: " + b"x" * (2 * MAX_HEADER_BYTES))
        answer = await until_closed(reader)
        assert not answer or answer.startswith(b"HTTP/1.1 400")
        writer.close()
        assert await is_served(port, either_scheme)


async def test_a_client_that_stops_reading_is_cut_off_and_its_work_ends(
    make_site: MakeSite, tokenizer: ModelTokenizer, either_scheme: Tls | None
) -> None:
    ids = tuple(tokenizer.encode("a b c d e f g ")) * 20_000
    site = make_site(lambda asked: Script(tokens=(ids,)))
    async with served(site, PATIENT, either_scheme) as port:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", port))
        _, lazy = await connected(port, either_scheme, small)
        lazy.write(request(stream=True, max_tokens=4000, n=20))
        async with asyncio.timeout(DEADLINE_S):
            await site.service.submitted.wait()
            await site.service.streams[0].aborted.wait()
        lazy.close()
        assert await is_served(port, either_scheme)


async def test_many_bad_clients_leave_nothing(
    make_site: MakeSite, tokenizer: ModelTokenizer, either_scheme: Tls | None
) -> None:
    """Half a request, a stalled body, a stream that is left, a reset: all at once, and one good client among them."""
    site = make_site(lambda asked: Script(tokens=(tuple(tokenizer.encode("a b c")),), held_after=asked.sampling.seed))
    good: dict[str, object] = {"model": "tiny", "prompt": "hi", "seed": 100}
    limits = ConnectionLimits(write_timeout_s=0.3)  # 200 handshakes take their time
    async with served(site, limits, either_scheme) as port, client_of(port, either_scheme) as client:
        url = "/v1/completions"
        assert (await client.post(url, json=good)).status_code == 200
        gc.collect()
        before, memory = open_descriptors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writers = []
        for number in range(NUM_CLIENTS):
            _, writer = await connected(port, either_scheme)
            writer.write((HEAD, HEAD + b"\r\n{", request(stream=True, seed=1), request(seed=1))[number % 4])
            writers.append(writer)
        await until(lambda: len(site.service.streams) >= NUM_CLIENTS // 2 + 1)
        assert (await client.post(url, json=good)).status_code == 200
        for number, writer in enumerate(writers):
            if number % 8 < 4:
                writer.transport.abort()
            else:
                writer.close()
        await until(lambda: len(open_descriptors()) <= len(before))
        assert (await client.post(url, json=good)).status_code == 200
    site.service.check_invariants()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 40_000  # KiB
