"""Every parameter that docs/api.md calls supported, along every path: the same body, and not for want of an effect."""

from typing import Any

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
# More tokens than there are before the hand-over: what looks back looks over it.
LONG: Json = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
FIRST_LETTERS = {str(token_id): 5 for token_id in range(100, 110)}


@pytest.fixture
def paths(long_paths: Paths) -> Paths:
    return long_paths


@pytest.mark.parametrize(("row", "endpoint"), SUPPORTED, ids=lambda each: each.name if isinstance(each, Row) else each)
def test_a_parameter_means_the_same_on_every_path(paths: Paths, row: Row, endpoint: str) -> None:
    path, plain = PLAIN[endpoint]
    reply = paths.post({**plain, "max_tokens": 24, "seed": 5, **row.fields(endpoint), "model": MODEL}, path)
    assert reply.status == httpx.codes.OK, reply
    assert reply.events or reply.choices


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 2},
        {"logit_bias": FIRST_LETTERS},
        {"temperature": 1, "seed": 3},
        {"temperature": 1, "seed": 3, "top_k": 2},
        {"temperature": 2, "seed": 3, "top_p": 0.3},
        {"temperature": 2, "seed": 3, "min_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", PLAIN)
def test_what_changes_the_choice_of_tokens_changes_it_alike(paths: Paths, endpoint: str, more: dict[str, Any]) -> None:
    path, plain = PLAIN[endpoint]
    bodies = [{"model": MODEL, **plain, **LONG, **fields} for fields in ({}, more)]
    greedy, changed = (paths.post(body, path) for body in bodies)
    assert changed.status == greedy.status == httpx.codes.OK, changed
    assert said(changed) != said(greedy)
    assert changed.body["usage"]["completion_tokens"] == LONG["max_tokens"]


def said(reply: Reply) -> str:
    (choice,) = reply.choices
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_all_of_it_went_the_remote_way(paths: Paths) -> None:
    """Or the bodies above prove nothing."""
    assert paths.fronts["disaggregated"].readings().total(table.HANDOFFS, outcome="received") > len(SUPPORTED)
