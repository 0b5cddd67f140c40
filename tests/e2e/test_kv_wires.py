"""Pairs whose KV loses bits on the way, as real processes: other dtypes and compressed wires, with bounded numerics."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.cluster import START_TIMEOUT_S, Front, announced, completion, router, worker

from disagg.modelfiles.config import read_config
from disagg.telemetry import metrics as table
from disagg.testing.processes import wait_until

pytestmark = pytest.mark.timeout(300)  # five processes start first

PROMPT = [3 + index % 200 for index in range(100)]
MIXED = "native"
# Served name: further arguments of prefill, of decode.
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "half": ((), ("--kv-dtype", "float16", "--block-size", "32")),
    "int8": (("--kv-wire", "int8"), ("--kv-wire", "int8", "--kv-dtype", "float16")),
}
NUM_WORKERS = 2 * len(PAIRS) + 1
BOUNDED = ("--numerics", "bounded", "--min-push-bytes", "1K", "--chunk-tokens", "32")


@pytest.fixture(scope="module")
def front(tiny_llama: Path) -> Iterator[Front]:
    with ExitStack() as stack:
        models = dict.fromkeys((MIXED, *PAIRS), tiny_llama)
        where = announced(stack.enter_context(router(models, "--local-prefill-tokens", "0")))
        started: list[tuple[str, str, tuple[str, ...]]] = [(MIXED, "mixed", ())]
        for name, (prefill, decode) in PAIRS.items():
            started += [(name, "prefill", prefill), (name, "decode", decode)]
        for name, role, more in started:
            arguments = ("--served-name", name, *BOUNDED, *more)
            stack.enter_context(worker(tiny_llama, role, f"{role}-{name}", where.control, *arguments))
        with Front(f"http://{where.http}") as front:
            wait_until(lambda: are_paired(front), 2 * START_TIMEOUT_S, "every pair to meet")
            yield front


def are_paired(front: Front) -> bool:
    workers = front.client.get("/cluster").json()["workers"]
    num_pairs = sum(bool(each["partners"]) for each in workers if each["role"] == "prefill")
    return len(workers) == NUM_WORKERS and num_pairs == len(PAIRS)


def row_bytes(name: str, head_dim: int) -> int:
    """Of a row of head_dim numbers on the wire."""
    return 2 * head_dim if name == "half" else head_dim + 4


@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_whole_and_the_bytes_are_those_of_the_wire(front: Front, name: str, tiny_llama: Path) -> None:
    config = read_config(tiny_llama)
    before = front.wait_counted()
    first = front.post(completion(name, PROMPT, 12)).json()
    assert first["usage"]["completion_tokens"] == 12
    native = front.post(completion(MIXED, PROMPT, 12)).json()
    # Bounded: the first token is computed where the prompt is read, and is the same; later ones may come to differ.
    tokens, expected = (each["choices"][0]["logprobs"]["tokens"] for each in (first, native))
    assert tokens[0] == expected[0]
    seen = front.wait_counted().since(before)
    sent = seen.total(table.HANDOFF_BYTES, worker=f"prefill-{name}")
    rows = 2 * config.num_layers * config.num_kv_heads * len(PROMPT)
    assert sent == rows * row_bytes(name, config.head_dim)
    assert seen.total(table.PROMPT_TOKENS_RECEIVED, worker=f"decode-{name}") == len(PROMPT)
    assert seen.total(table.PUSH_RETRIES) == seen.total(table.LANDINGS_REJECTED) == seen.total(table.MOVES) == 0


@pytest.mark.parametrize("name", ["half", "int8"])
def test_the_same_prompt_again_is_answered_from_what_came_before(front: Front, name: str) -> None:
    """Over the same wire, so by KV of the same kind: the same tokens, and hardly a byte."""
    prompt = [5 + index % 190 for index in range(90)]
    answers = [front.complete(name, prompt, 12) for _ in range(2)]
    assert answers[0] == answers[1]
    before = front.wait_counted()
    assert front.complete(name, prompt, 12) == answers[0]
    seen = front.wait_counted().since(before)
    assert seen.total(table.PROMPT_TOKENS_RECEIVED, worker=f"decode-{name}") <= 32
