"""Requests for several answers, along every path: one prompt is read, one hand-off is made, each answer is its own."""

import pytest
from tests.e2e.api_paths import Paths, completion

from disagg.policy.routing import PlacementReason
from disagg.telemetry import metrics as table

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("plain paths")]
BLOCK_SIZE = 16
NUM_PROMPT = 100  # 6 blocks and 4 tokens


@pytest.fixture
def paths(plain_paths: Paths) -> Paths:
    return plain_paths


def prompt_of(salt: int) -> list[int]:
    return [3 + (salt * 11 + place * 5) % 290 for place in range(NUM_PROMPT)]


@pytest.mark.parametrize("num_choices", [2, 4])
def test_one_prompt_is_read_and_handed_over_once(paths: Paths, num_choices: int) -> None:
    prompt = prompt_of(num_choices)
    before = {name: front.wait_counted() for name, front in paths.fronts.items()}
    sampled = {"temperature": 0.9, "seed": 7, "logprobs": 1, "max_tokens": 12}
    reply = paths.complete(prompt, n=num_choices, **sampled)
    assert len({choice["text"] for choice in reply.choices}) == num_choices
    usage = reply.body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, 12 * num_choices)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    num_tails = (num_choices - 1) * (NUM_PROMPT % BLOCK_SIZE)
    for name, front in paths.fronts.items():
        seen = front.wait_counted().since(before[name])
        is_handed_over = name == "disaggregated"
        assert seen.total(table.PROMPT_TOKENS_COMPUTED) == NUM_PROMPT + num_tails
        assert seen.total(table.PROMPT_TOKENS_COMPUTED, role="prefill") == NUM_PROMPT * is_handed_over
        assert seen.total(table.PROMPT_TOKENS_RECEIVED) == NUM_PROMPT * is_handed_over
        assert seen.total(table.HANDOFFS, outcome="received") == is_handed_over
        assert seen.total(table.PLACEMENTS, reason=PlacementReason.SHARED_PROMPT) == num_choices - 1
    alone = paths.complete(prompt, **sampled)
    assert alone.choices[0] == reply.choices[0]
    assert alone.body["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("more", [{"max_tokens": 1}, {"stop": ["a", "e"]}, {"echo": True, "logprobs": 1}])
def test_ends_and_scores_are_those_of_every_path(paths: Paths, more: dict[str, object]) -> None:
    """A leader may end by its first token, or by its text before its prompt has come to the decode worker."""
    for salt in range(3):
        prompt = prompt_of(40 + salt)
        asked = {"n": 4, "temperature": 1.0, "seed": salt, **more}
        whole = paths.complete(prompt, **asked)
        for front in paths.fronts.values():  # how the parts of several answers are mixed is nobody's promise
            streamed = Paths({"mixed": front}).post(completion(prompt, **asked, stream=True))
            for choice in whole.choices:
                assert "".join(part["text"] for part in streamed.streamed(choice["index"])) == choice["text"]
    for front, num_workers in zip(paths.fronts.values(), (1, 2, 2), strict=True):
        front.wait_idle(num_workers)
