"""A worker's own /metrics: what it shows, and who is let go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.worker.rigs import DEADLINE_S, layout, meet, site, until

from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.protocol.state_metrics import worker_exposition
from disagg.telemetry.metrics import LINKS, TRANSPORTS_CHOSEN, WORKER_METRICS, MetricKind
from disagg.worker import metrics_page
from disagg.worker.config import WorkerConfig
from disagg.worker.metrics_page import MAX_CONNECTIONS, MetricsPage

pytestmark = pytest.mark.usefixtures("no_socket_left")


@contextlib.asynccontextmanager
async def page(text: bytes = b"disagg_pushes_total 1\n") -> AsyncIterator[tuple[MetricsPage, str, int]]:
    made = MetricsPage(lambda: text)
    host, _, port = (await made.listen("127.0.0.1", 0)).rpartition(":")
    try:
        yield made, host, int(port)
    finally:
        made.check_invariants()
        await made.close()
        await made.close()


async def ask(host: str, port: int, request: bytes) -> bytes:
    """The whole answer, until the other side ends it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                return await reader.read()
            return b""
    finally:
        writer.close()


async def test_get_metrics_is_answered_and_the_connection_ended() -> None:
    async with page() as (_, host, port):
        for path in (b"/metrics", b"/metrics?name=x"):
            answer = await ask(host, port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
            assert f"Content-Length: {len(body)}".encode() in head
            assert body == b"disagg_pushes_total 1\n"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"GET / HTTP/1.1", b"404"), (b"POST /metrics HTTP/1.1", b"405"), (b"\xff\xfe\x00", b"404"), (b"", b"404")],
)
async def test_there_is_nothing_else(request_line: bytes, status: bytes) -> None:
    async with page() as (_, host, port):
        answer = await ask(host, port, request_line + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)


async def test_who_asks_slowly_at_length_or_not_at_all_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page() as (_, host, port):
        with monkeypatch.context() as patience:
            patience.setattr(metrics_page, "ANSWER_TIMEOUT_S", 0.2)
            assert await ask(host, port, b"GET /metrics") == b""
        assert await ask(host, port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (64 << 10)) == b""
        assert (await ask(host, port, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(b"disagg_pushes_total 1\n")


async def test_more_than_a_few_at_once_are_not_let_in() -> None:
    async with page() as (made, host, port):
        held = [await asyncio.open_connection(host, port) for _ in range(MAX_CONNECTIONS)]
        await until(lambda: len(made._answering) == MAX_CONNECTIONS)
        assert await ask(host, port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        made.check_invariants()
        for _, writer in held:
            writer.close()
        await until(lambda: not made._answering)
        assert (await ask(host, port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_an_address_that_is_taken_is_one_plain_line() -> None:
    async with page() as (_, host, port):
        with pytest.raises(ConfigurationError, match=f"cannot show metrics at {host}:{port}.*choose another"):
            await MetricsPage(lambda: b"").listen(host, port)


async def test_a_worker_shows_its_whole_part_of_the_table_and_who_it_has_met() -> None:
    async with site("p", Role.PREFILL) as one, site("d", Role.DECODE, kv=layout(block_size=8)) as other:
        await meet(one, other)
        text = worker_exposition(one.peers.card, one.worker.state())
        families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        names = {m.name.removesuffix("_total") if m.kind is MetricKind.COUNTER else m.name for m in WORKER_METRICS}
        assert families.keys() == names
        for family in families.values():
            for sample in family.samples:
                assert {"worker": "p", "role": "prefill", "model": "fake"}.items() <= sample.labels.items()
        (met,) = families[TRANSPORTS_CHOSEN.name.removesuffix("_total")].samples
        assert (met.labels["reason"], met.value) == ("only", 1)
        assert {s.labels["transport"]: s.value for s in families[LINKS.name].samples if s.value} == {"tcp": 1}


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="metrics_port is 70000"):
        WorkerConfig(
            model="m", served_name="m", role=Role.MIXED, worker_id="w", router_address="h:1", metrics_port=70000
        )
