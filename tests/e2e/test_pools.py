"""Several pools behind one router, pairs that must not be, and a router that comes and goes."""

import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.cluster import (
    FAST_BEATS,
    START_TIMEOUT_S,
    Front,
    announced,
    caught,
    completion,
    is_ready,
    reserved_ports,
    router,
    worker,
)
from tests.e2e.models import write_served_model
from tests.parity.prompts import Spelling

from disagg.modelfiles.digest import model_digest
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.telemetry import metrics as table
from disagg.testing.processes import END_TIMEOUT_S, MarkedProcess, wait_until

REMOTE = ("--local-prefill-tokens", "0")
pytestmark = pytest.mark.timeout(300)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    return [
        [3 + (seed + 7 * number + index * index) % 300 for index in range(5 + 23 * number)] for number in range(count)
    ]


def test_two_models_behind_one_router_keep_to_themselves(tiny_llama: Path, tiny_qwen2: Path) -> None:
    from tests.parity.reference import Reference  # imports transformers

    models = {"tiny-llama": tiny_llama, "tiny-qwen2": tiny_qwen2}
    with ExitStack() as stack:
        where = announced(stack.enter_context(router(models, *REMOTE, *FAST_BEATS)))
        for name, path in models.items():
            for role in ("prefill", "decode"):
                more = ("--served-name", name, *FAST_BEATS)
                stack.enter_context(worker(path, role, f"{role}-{name}", where.control, *more))
        front = stack.enter_context(Front(f"http://{where.http}"))
        wait_until(
            lambda: all(model["is_ready"] for model in front.health().json()["models"]), START_TIMEOUT_S, "both models"
        )
        partners = {
            worker["worker_id"]: worker["partners"] for worker in front.client.get("/cluster").json()["workers"]
        }
        assert partners == {
            "prefill-tiny-llama": ["decode-tiny-llama"],
            "prefill-tiny-qwen2": ["decode-tiny-qwen2"],
            "decode-tiny-llama": [],
            "decode-tiny-qwen2": [],
        }
        before = front.readings()
        asked = [(name, prompt) for prompt in prompts_of(0, 10) for name in models]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda each: front.complete(each[0], each[1], 16)[0].tokens, asked))
        seen = front.settled({"decode": 20, "prefill": 20}, before)
        for name, path in models.items():
            assert seen.total(table.HANDOFFS, model=name, outcome="received") == 10
            assert seen.total(table.HANDOFFS, model=name, outcome="sent") == 10
            assert seen.total(table.HANDOFFS, worker=f"decode-{name}") == 10
            # What each model would have written with nobody else around.
            reference, spelling = Reference(path), Spelling(load_tokenizer(path))
            for (asked_name, prompt), tokens in zip(asked, answers, strict=True):
                if asked_name == name:
                    differences = reference.differences(prompt, spelling.ids(tokens))
                    assert all(difference.is_near_tie for difference in differences), (name, len(prompt), differences)
        front.wait_idle(4)


def test_workers_of_unlike_weights_are_never_paired(tmp_path: Path) -> None:
    """Same shape, same name, same tokenizer, other weights: refused when they meet, and both digests are named."""
    one = write_served_model(tmp_path / "one", "llama", seed=0)
    other = write_served_model(tmp_path / "other", "llama", seed=1)
    digests = [model_digest(one), model_digest(other)]
    assert digests[0] != digests[1]
    more = ("--served-name", "tiny", *FAST_BEATS)
    with ExitStack() as stack:
        where = announced(stack.enter_context(router({"tiny": one}, *REMOTE, *FAST_BEATS)))
        front = stack.enter_context(Front(f"http://{where.http}"))
        stack.enter_context(worker(one, "prefill", "prefill-one", where.control, *more))
        # The other worker never comes, for now.
        wait_until(
            lambda: "no decode worker has registered" in front.health().text, START_TIMEOUT_S, "the prefill worker"
        )
        assert front.health().status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert int(front.health().headers["Retry-After"]) >= 1
        stack.enter_context(worker(other, "decode", "decode-other", where.control, *more))
        wait_until(lambda: "cannot be paired" in front.health().text, START_TIMEOUT_S, "the refusal")
        health = front.health()
        assert health.status_code == httpx.codes.SERVICE_UNAVAILABLE
        missing = health.json()["missing"]
        assert all(digest in missing for digest in digests), missing
        assert "prefill-one and decode-other cannot be paired: model digest" in missing
        refused = front.post(completion("tiny", [5, 6, 7], 3))
        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert "Retry-After" in refused.headers

        stack.enter_context(worker(one, "decode", "decode-one", where.control, *more))
        wait_until(lambda: is_ready(front), START_TIMEOUT_S, "a pair that fits")
        before = front.readings()
        for prompt in prompts_of(1, 6):
            front.complete("tiny", prompt, 4)
        seen = front.settled({"decode": 6, "prefill": 6}, before)
        assert seen.total(table.HANDOFFS, worker="decode-one", outcome="received") == 6
        assert seen.total(table.SEQUENCES, worker="decode-other") == 0
        front.wait_idle(3)


def pids_of(processes: Sequence[MarkedProcess]) -> list[int]:
    return [pid for process in processes for pid in process.family()]


def test_workers_find_a_router_that_comes_back(tiny_llama: Path) -> None:
    """Stopped in order or killed, with an answer under way: the same workers serve the next router."""
    model = "tiny-llama"
    prompt = [3 + index for index in range(100)]
    with ExitStack() as stack:
        port, control_port = stack.enter_context(reserved_ports(2))
        control = f"127.0.0.1:{control_port}"
        front = stack.enter_context(Front(f"http://127.0.0.1:{port}"))
        workers = [
            stack.enter_context(worker(tiny_llama, role, f"{role}-0", control, *FAST_BEATS))
            for role in ("prefill", "decode")
        ]
        answers, pids = [], []
        for ending in (signal.SIGTERM, signal.SIGKILL, None):
            with router({model: tiny_llama}, *REMOTE, *FAST_BEATS, port=port, control_port=control_port) as running:
                announced(running)
                wait_until(lambda: is_ready(front), START_TIMEOUT_S, "the pair")
                front.wait_idle(2)
                answers += front.complete(model, prompt, 8)
                pids.append(pids_of(workers))
                if ending is not None:
                    end_mid_stream(front, running, workers[1].pid, completion(model, prompt, 500, stream=True), ending)
                    with pytest.raises(httpx.ConnectError):
                        front.health()
        assert answers[1:] == answers[:1] * 2
        assert pids[1:] == pids[:1] * 2


def end_mid_stream(front: Front, running: MarkedProcess, writer: int, body: dict[str, Any], number: int) -> None:
    """The client of a router that stops is told why; of a killed one it sees the end of the connection."""
    with caught(front, body, [writer]) as stream:
        running.send_signal(number)
        if number == signal.SIGKILL:
            with pytest.raises(httpx.TransportError):
                list(stream.lines)
        else:
            assert any("the router is stopping" in line for line in stream.lines)
    running.wait(END_TIMEOUT_S)
