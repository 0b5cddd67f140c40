"""Class E on real processes: equal bodies on every path (E10), and contexts that differ between workers (E4)."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.e2e.cluster import START_TIMEOUT_S, Front, announced, completion, router, worker

from disagg.telemetry import metrics as table
from disagg.testing.processes import wait_until

pytestmark = pytest.mark.timeout(300)  # five processes start first

NUM_PROMPTS = 50
LOCAL_TOKENS = 24  # shorter prompts are read where they are decoded
PREFILL_CONTEXT = 200  # the others have what the model allows: 700
NARROW = ("--max-context", str(PREFILL_CONTEXT))
# Who serves what, and how: (served name, worker, role, further arguments).
WORKERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("mixed", "mixed-0", "mixed", ()),
    ("pair", "prefill-0", "prefill", ("--min-push-bytes", "1K", "--chunk-tokens", "16", *NARROW)),
    ("pair", "prefill-1", "prefill", ("--handoff", "sync", "--block-size", "8", *NARROW)),
    ("pair", "decode-0", "decode", ()),
)


@pytest.fixture(scope="module")
def fleet(tiny_llama: Path) -> Iterator[str]:
    """The address of a router with all of WORKERS, every pair of which has met."""
    with ExitStack() as stack:
        models = dict.fromkeys((name for name, *_ in WORKERS), tiny_llama)
        where = announced(stack.enter_context(router(models, "--local-prefill-tokens", str(LOCAL_TOKENS))))
        for name, worker_id, role, more in WORKERS:
            stack.enter_context(worker(tiny_llama, role, worker_id, where.control, "--served-name", name, *more))
        with Front(f"http://{where.http}") as front:
            wait_until(lambda: are_up(front), 2 * START_TIMEOUT_S, "all workers, and all pairs of them")
        yield f"http://{where.http}"


def are_up(front: Front) -> bool:
    workers = front.client.get("/cluster").json()["workers"]
    num_pairs = sum(len(each["partners"]) for each in workers if each["role"] == "prefill")
    return len(workers) == len(WORKERS) and num_pairs == 2


@pytest.fixture
def front(fleet: str) -> Iterator[Front]:
    with Front(fleet) as front:
        front.wait_idle(len(WORKERS))
        yield front


FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "seed": 11, "top_p": 0.7, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "n": 3},
    {"temperature": 0, "stop": ["a", "e"]},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.9, "seed": 3, "ignore_eos": False},
    {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    {"temperature": 0.7, "seed": 2, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
)


def body_of(front: Front, model: str, prompt: list[int], more: dict[str, Any]) -> Any:
    """All that a client sees, but ids, times and what was found cached."""
    body = {**completion(model, prompt, 12), **more}
    if not more.get("stream"):
        response = front.post(body)
        assert response.status_code == httpx.codes.OK, response.text
        return _kept(response.json())
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices: dict[int, list[Any]] = {}
    usage = None
    for line in lines:
        event = _kept(msgspec.json.decode(line))
        usage = event["usage"] or usage
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append((choice["text"], choice["finish_reason"]))
    # Tokens of one step travel together, so the cut of a stream may differ, its text may not.
    return usage, {i: ("".join(text for text, _ in parts), parts[-1][1]) for i, parts in choices.items()}


def _kept(body: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in body, body
    usage = body.get("usage")
    return {
        "choices": body["choices"],
        "usage": usage and {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    }


def test_e10_bodies_are_equal_on_every_path_for_50_prompts_and_all_parameters(front: Front) -> None:
    """Mixed against separate workers: read locally, handed over by layers and all at once, between block sizes."""
    rng = random.Random(10)
    asked = []
    for number in range(NUM_PROMPTS):
        prompt = [3 + rng.randrange(290) for _ in range(rng.choice([1, 7, 15, 16, 17, 24, 25, 33, 64, 100, 150]))]
        asked.append((prompt, FEATURES[number % len(FEATURES)]))
    before = front.wait_counted()
    with ThreadPoolExecutor(4) as threads:
        expected = list(threads.map(lambda each: body_of(front, "mixed", *each), asked))
        for _ in range(2):  # the second time with what is cached from the first
            found = list(threads.map(lambda each: body_of(front, "pair", *each), asked))
            for (prompt, more), one, other in zip(asked, expected, found, strict=True):
                assert one == other, (len(prompt), more)
    front.wait_idle(len(WORKERS))
    seen = front.wait_counted().since(before)
    num_remote = seen.total(table.PLACEMENTS, reason="long_prompt")
    for reason in ("mixed_worker", "short_prompt", "long_prompt"):
        assert seen.total(table.PLACEMENTS, reason=reason) >= NUM_PROMPTS / 4, reason
    for name in ("prefill-0", "prefill-1"):
        assert seen.total(table.HANDOFFS, worker=name, outcome="sent") > 3
        assert seen.total(table.HANDOFF_BYTES, worker=name) > 0
    assert seen.total(table.HANDOFFS, worker="decode-0", outcome="received") == num_remote
    num_local, num_shared = (
        seen.total(table.PLACEMENTS, reason=reason) for reason in ("short_prompt", "shared_prompt")
    )
    num_read = seen.total(table.PROMPT_TOKENS_COMPUTED, worker="decode-0")
    assert num_read <= LOCAL_TOKENS * num_local + 16 * num_shared
    assert seen.total(table.MOVES) == 0


@pytest.mark.parametrize("length", [PREFILL_CONTEXT, PREFILL_CONTEXT + 1, 500])
def test_e4_over_http_a_prompt_over_the_prefill_workers_context_is_read_where_it_is_decoded(
    front: Front, length: int
) -> None:
    """Never a fluent answer out of empty KV: the router knows both limits and goes the other way, which is counted."""
    prompt = [3 + index % 290 for index in range(length)]
    before = front.readings()
    answers = [front.post(completion(name, prompt, 10)).json() for name in ("pair", "mixed")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == length
    front.wait_idle(len(WORKERS))
    placed = front.readings().since(before)
    assert placed.total(table.PLACEMENTS, reason="prefill_pool_too_small") == (length > PREFILL_CONTEXT)


def test_e4_over_http_a_prompt_over_both_limits_is_a_400_and_not_a_token(front: Front) -> None:
    response = front.post(completion("pair", [3] * 695, 10))
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert "700 tokens" in response.json()["error"]["message"]
    assert "choices" not in response.json()
