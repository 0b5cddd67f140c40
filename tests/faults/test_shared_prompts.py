"""Choices that share a prompt, in virtual time: whatever fails while they wait or write, each answer is whole."""

import functools
from collections.abc import Callable

import pytest
from tests.faults.virtual_rigs import TIMES, WatchedCluster, ask

from disagg.core.ids import RequestId, SequenceId
from disagg.core.request import FinishReason
from disagg.policy.routing import PlacementReason
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens

NUM_PROMPT, LENGTH, NUM_CHOICES = 30, 10, 4
NUM_TAIL = 2  # tokens behind the last whole block that is shared
MOMENTS = 40  # of the time that an undisturbed answer takes


def killed(cluster: WatchedCluster, name: str) -> None:
    cluster.kill(name)
    cluster.time.after(0.3, lambda: cluster.restart(name))


def stopped(cluster: WatchedCluster, request_id: RequestId) -> None:
    if cluster.answers[request_id].finish[0] is None:
        cluster.stop_choice(request_id, 0)


def left(cluster: WatchedCluster, request_id: RequestId) -> None:
    if not cluster.answers[request_id].is_over:
        cluster.abort(request_id)


Fault = Callable[[WatchedCluster, RequestId], object]
FAULTS: dict[str, Fault] = {
    "decode dies": lambda cluster, request_id: killed(cluster, "d0"),
    "prefill dies": lambda cluster, request_id: killed(cluster, "p0"),
    "decode hangs": lambda cluster, request_id: cluster.pause("d0", 0.8, is_noticed=True),
    "decode drains": lambda cluster, request_id: cluster.drain("d0"),
    "the link is cut": lambda cluster, request_id: cluster.cut("p0", "d0"),
    "the first choice stops": stopped,
    "the client leaves": left,
}


def run(seed: int, max_tokens: int, fault: Fault | None = None, after_s: float = 0.0) -> WatchedCluster:
    """One request; `fault` strikes so long after it was sent. Every token that came is the right one."""
    cluster = WatchedCluster(seed)
    cluster.start(1, 2)
    asked = ask(NUM_PROMPT, max_tokens, salt=seed, temperature=0.8, num_choices=NUM_CHOICES)
    request_id = cluster.submit(asked)
    if fault is not None:
        cluster.time.after(after_s, lambda: fault(cluster, request_id))
    cluster.time.run(until=lambda: cluster.are_all_over)
    answer = cluster.answers[request_id]
    assert answer.error is None, (answer.error, cluster.time.story())
    layout = cluster.worker("d1").card.layout
    for index, tokens in enumerate(answer.tokens):
        expected = expected_tokens(layout, SequenceId(request_id, index), asked.prompt_ids, asked.sampling)
        is_cut = answer.is_aborted or answer.finish[index] is FinishReason.STOP
        assert tokens == (expected[: len(tokens)] if is_cut else expected), cluster.time.story()
    return cluster


@pytest.mark.parametrize("max_tokens", [1, LENGTH])
@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_undisturbed_one_prompt_is_read_and_one_hand_off_made(seed: int, max_tokens: int) -> None:
    cluster = run(seed, max_tokens)
    cluster.check_nothing_left()
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "p") == NUM_PROMPT
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "d") == (NUM_CHOICES - 1) * NUM_TAIL
    assert cluster.total(table.PROMPT_TOKENS_RECEIVED) == NUM_PROMPT
    assert cluster.total(table.HANDOFFS, label="received") == 1
    counters = cluster.dispatcher.counters
    assert counters.get(table.PLACEMENTS, PlacementReason.SHARED_PROMPT.value) == NUM_CHOICES - 1
    assert counters.get(table.GENERATED_TOKENS) == NUM_CHOICES * max_tokens


@functools.cache
def duration_s(max_tokens: int) -> float:
    """From the request to its last token, undisturbed."""
    cluster = run(0, max_tokens)
    times = [when_s for found in cluster.deliveries.values() for when_s, _ in found]
    first = WatchedCluster(0)
    first.start(1, 2)
    return max(times) - first.time.now_s


@pytest.mark.parametrize("max_tokens", [1, LENGTH])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_any_moment_leaves_every_answer_whole(name: str, max_tokens: int) -> None:
    for moment in range(MOMENTS):
        after_s = duration_s(max_tokens) * moment / MOMENTS
        run(moment % 5, max_tokens, FAULTS[name], after_s).check_nothing_left()
