"""Clients of the router benchmark count what the fake HTTP worker sends; a router that cannot be had is left out."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture
def modules(load_script: Callable[[str], Any]) -> Any:
    class Modules:
        fake_http_worker: Any = load_script("fake_http_worker")
        load: Any = load_script("router_load")
        router: Any = load_script("router")
        routers: Any = load_script("peers.routers")
        environments: Any = load_script("peers.environments")

    return Modules


async def test_what_is_measured_of_a_worker_that_is_asked_directly(modules: Any) -> None:
    worker = modules.fake_http_worker.HttpFakeWorker([" a", " b"])
    await worker.listen()
    bench = modules.load.Bench(worker, (os.getpid(),), worker.port)
    for _ in range(2):  # nothing of one measurement is left in the next
        paced = await bench.paced(3, 4)
        assert 0 < paced["token_p50_s"] < 1
        assert (await bench.flat_out(3, 60))["tokens_per_s"] > 0
        assert (await bench.requests(2, 3))["requests_per_s"] > 0
        assert (await bench.idle(3))["idle_total_bytes"] > 0
        assert not worker.open
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.port}", trust_env=False, timeout=5.0) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        answer = (await client.post("/v1/completions", json={"prompt": "x"})).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (" a", "length")
    worker.close()


async def test_a_router_that_cannot_be_had_is_left_out_with_the_reason(
    modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python_for(peer: Any) -> Path:
        raise modules.environments.Unavailable(f"{peer.name} is nowhere")

    monkeypatch.setattr(modules.router, "python_for", python_for)
    (peer,) = modules.routers.chosen_routers("vllm-router")
    with ExitStack() as stack:
        assert await modules.router.their_side(peer, stack) is None
    assert "vllm-router is left out: vllm-router is nowhere" in capsys.readouterr().out


def test_an_unknown_router_is_refused(modules: Any) -> None:
    with pytest.raises(SystemExit, match="nginx"):
        modules.routers.chosen_routers("vllm-router,nginx")
