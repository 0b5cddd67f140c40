"""Every parameter that docs/api.md calls supported, along every path: the same body, and not for want of an effect."""

import httpx
import pytest
from tests.e2e.api_paths import MODEL, Json, Paths, Reply
from tests.unit.router.test_api_docs import PARAMETERS, Row

from disagg.telemetry import metrics as table

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("long paths")]
WORDS = "the quick brown fox jumps over the lazy dog"
PLAIN: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "completions": ("/v1/completions", {"prompt": WORDS}),
}
SUPPORTED = [(row, endpoint) for row in PARAMETERS for endpoint in PLAIN if row.word(endpoint) == "yes"]
# Penalties look back over the hand-over: prompt and first token were read and written by another worker.
GREEDY: Json = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAMPLED: Json = {**GREEDY, "temperature": 2, "seed": 3}
FEW: Json = {**GREEDY, "logit_bias": {str(token_id): 5 for token_id in range(300, 310)}}  # words, again and again
CHANGES: tuple[tuple[Json, tuple[Json, ...]], ...] = (
    (GREEDY, (FEW, {"repetition_penalty": 2})),
    (FEW, ({"presence_penalty": 2}, {"frequency_penalty": 2})),
    (SAMPLED, ({"seed": 4}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5})),
)


@pytest.fixture
def paths(long_paths: Paths) -> Paths:
    return long_paths


@pytest.mark.parametrize(("row", "endpoint"), SUPPORTED, ids=lambda each: each.name if isinstance(each, Row) else each)
def test_a_parameter_means_the_same_on_every_path(paths: Paths, row: Row, endpoint: str) -> None:
    path, plain = PLAIN[endpoint]
    reply = paths.post({**plain, "max_tokens": 12, "seed": 5, **row.fields(endpoint), "model": MODEL}, path)
    assert reply.status == httpx.codes.OK, reply
    assert reply.events or reply.choices


@pytest.mark.parametrize("endpoint", PLAIN)
def test_what_changes_the_choice_of_tokens_changes_it_alike(paths: Paths, endpoint: str) -> None:
    path, plain = PLAIN[endpoint]
    for fields, changes in CHANGES:
        before, *after = (
            said(paths.post({"model": MODEL, **plain, **fields, **more}, path)) for more in ({}, *changes)
        )
        assert before not in after, (changes, before, after)


def said(reply: Reply) -> str:
    assert reply.status == httpx.codes.OK, reply
    assert reply.body["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    (choice,) = reply.choices
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_all_of_it_went_the_remote_way(paths: Paths) -> None:
    """Or the bodies above prove nothing."""
    assert paths.fronts["disaggregated"].readings().total(table.HANDOFFS, outcome="received") > 0
