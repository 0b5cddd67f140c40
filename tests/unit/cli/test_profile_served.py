"""What counts of loads on a served model."""

import pytest

from disagg.bench.record import RequestRecord
from disagg.cli.profile_served import ANSWER, BOTH, NUM_STREAMS, PROMPTS, PROMPTS_TWICE, STREAMS, STREAMS_TWICE, Seen
from disagg.core.errors import ConfigurationError


def record(number: int, due_s: float, ttft_s: float, gap_s: float, num_tokens: int) -> RequestRecord:
    token_s = tuple(due_s + ttft_s + gap_s * position for position in range(num_tokens))
    return RequestRecord(
        number=number,
        due_s=due_s,
        sent_s=due_s,
        end_s=token_s[-1],
        token_s=token_s,
        num_prompt_tokens=32,
        num_output_tokens=num_tokens,
    )


def streams(num: int, gap_s: float) -> list[RequestRecord]:
    """They begin a tenth of a second apart."""
    return [record(number, 0.0, 0.1 * (1 + number), gap_s, ANSWER) for number in range(num)]


def seen() -> Seen:
    found = Seen()
    for place, num_tokens in enumerate(PROMPTS):
        found.add(f"lone {num_tokens}", [record(0, 0.0, 0.1 + place, 0.05, 4)])
    for num in STREAMS:
        found.add(f"streams {num}", streams(num, 0.02 + 0.001 * num))
    beside = [record(100, 0.0, 9.0, 0.03, 2), record(101, 0.7, 0.5, 0.03, 2)]
    found.add(BOTH, [*streams(NUM_STREAMS, 0.03), *beside])
    found.add(STREAMS_TWICE, streams(2 * NUM_STREAMS, 0.04))
    found.add(PROMPTS_TWICE, [record(0, 0.0, 0.6, 0.03, 2), record(1, 0.0, 0.8, 0.03, 2)])
    return found


def test_each_load_gives_its_medians() -> None:
    times = seen().times()
    assert [(each.num_tokens, round(each.ttft_s, 6)) for each in times.prompts] == [
        (num_tokens, 0.1 + place) for place, num_tokens in enumerate(PROMPTS)
    ]
    assert [round(gap.gap_s, 6) for gap in times.gaps] == [round(0.02 + 0.001 * num, 6) for num in STREAMS]
    assert times.first_gap_s == pytest.approx(0.05)
    assert times.gap_beside_prompts_s == pytest.approx(0.03)
    assert times.gap_beside_streams_s == pytest.approx(0.04)
    assert times.ttft_beside_prompts_s == pytest.approx(0.7)


def test_a_prompt_counts_only_while_all_streams_ran() -> None:
    assert seen().times().ttft_beside_streams_s == pytest.approx(0.5)


def test_gaps_count_only_while_all_streams_ran() -> None:
    late = record(1, 0.0, 1.0, 0.02, ANSWER)
    found = Seen()
    slow_alone = record(0, 0.0, 0.1, 0.5, ANSWER)
    found.add("x", [slow_alone, late])
    # Of the slow answer two gaps lie within the other one.
    assert sorted(round(gap_s, 6) for gap_s in found.gaps_s["x"])[-2:] == [0.5, 0.5]
    assert len(found.gaps_s["x"]) == 2 + ANSWER - 2


def test_streams_that_did_not_run_at_once_are_said() -> None:
    found = seen()
    found.gaps_s[BOTH].clear()
    with pytest.raises(ConfigurationError, match="quieter machine"):
        found.times()
