"""What goes into one step beside running streams."""

import pytest

from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.policy.batching import PromptWork, StepBudget, plan_chunks

BUDGET = StepBudget(chunk_tokens=10, mixed_chunk_tokens=4, max_running=8)


def work(*lengths: int) -> list[PromptWork]:
    request = RequestId(Incarnation(1), 1)
    return [PromptWork(SequenceId(request, index), length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "num_streams", "chunks"),
    [
        ((), 0, []),
        ((25,), 0, [10]),
        ((3, 7), 0, [3, 7]),
        ((3, 7, 1), 0, [3, 7]),
        ((6, 6), 0, [6, 4]),
        ((25,), 1, [4]),
        ((3, 9), 5, [3, 1]),
    ],
)
def test_prompts_fill_the_budget_in_order(lengths: tuple[int, ...], num_streams: int, chunks: list[int]) -> None:
    planned = plan_chunks(work(*lengths), num_streams=num_streams, budget=BUDGET)
    assert [chunk.num_tokens for chunk in planned] == chunks
    assert [chunk.sequence_id.choice for chunk in planned] == list(range(len(chunks)))
