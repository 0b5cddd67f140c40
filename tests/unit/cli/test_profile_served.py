"""What counts of loads on a served model."""

import pytest

from disagg.bench.record import RequestRecord
from disagg.cli.profile_served import (
    ANSWER,
    NEIGHBOUR_ANSWER,
    NUM_STREAMS,
    PROMPTS,
    PROMPTS_BY_STREAMS,
    PROMPTS_TWICE,
    STREAMS,
    STREAMS_BY_PROMPTS,
    STREAMS_TWICE,
    Seen,
)
from disagg.core.errors import ConfigurationError
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import ChoiceTimeline, Part, RequestTimeline, TimelineStage


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


def timeline(prefill_s: float, first_step_s: float, first_gap_s: float) -> RequestTimeline:
    """Of a lone answer."""
    stages = (
        TimelineStage(Part.TTFT, Stage.PREFILL, 0.0, prefill_s),
        TimelineStage(Part.FIRST_GAP, Stage.TRANSFER, prefill_s, first_gap_s - first_step_s),
        TimelineStage(Part.FIRST_GAP, Stage.FIRST_STEP, prefill_s + first_gap_s - first_step_s, first_step_s),
    )
    choice = ChoiceTimeline(
        choice=0,
        outcome="finished",
        path="remote",
        placement_reason="",
        fallback_reason="",
        prefill_worker="p",
        decode_worker="d",
        transport="",
        num_attempts=1,
        moves=(),
        num_cached_tokens=0,
        num_output_tokens=4,
        handoff_bytes=0,
        hidden_bytes=0,
        hidden_transfer_s=0.0,
        ttft_s=prefill_s,
        first_gap_s=first_gap_s,
        total_s=1.0,
        overlap_s=0.0,
        stages=stages,
    )
    return RequestTimeline(request_id="r", received_at=0.0, model="m", num_prompt_tokens=32, choices=(choice,))


def streams(num: int, gap_s: float) -> list[RequestRecord]:
    """They begin a tenth of a second apart. Numbers are even: they are nobody's neighbours."""
    return [record(2 * number, 0.0, 0.1 * (1 + number), gap_s, ANSWER) for number in range(num)]


def paced(number: int, slow_from_s: float, slow_until_s: float) -> RequestRecord:
    """A stream whose gaps are 20 ms, and 30 ms from one second to the other."""
    token_s = [0.1]
    while len(token_s) < ANSWER:
        token_s.append(token_s[-1] + (0.03 if slow_from_s <= token_s[-1] < slow_until_s else 0.02))
    return RequestRecord(
        number=number, due_s=0.0, end_s=token_s[-1], token_s=tuple(token_s), num_prompt_tokens=32, num_output_tokens=64
    )


def seen() -> Seen:
    found = Seen()
    for place, num_tokens in enumerate(PROMPTS):
        lone = [timeline(0.09 + place, first_step_s=0.045, first_gap_s=0.05)]
        found.add(f"lone {num_tokens}", [record(0, 0.0, 0.1 + place, 0.05, 4)], lone)
    for num in STREAMS:
        found.add(f"streams {num}", streams(num, 0.02 + 0.001 * num), ())
    neighbour = record(1, 0.4, 0.35, 0.03, 2)  # reads from 0.4 to 0.75
    found.add(STREAMS_BY_PROMPTS, [*(paced(2 * n, 0.4, 0.75) for n in range(NUM_STREAMS)), neighbour], ())
    neighbour = record(1, 0.4, 0.1, 0.46 / (NEIGHBOUR_ANSWER - 1), NEIGHBOUR_ANSWER)  # writes from 0.5 to 0.96
    found.add(STREAMS_TWICE, [paced(0, 0.5, 0.95), neighbour], ())
    prompts = [record(2 * place, *times_s, 0.001, 2) for place, times_s in enumerate(((0.0, 0.3), (0.55, 0.36)))]
    found.add(PROMPTS_BY_STREAMS, [*prompts, record(4, 0.92, 9.0, 0.001, 2), neighbour], ())
    found.add(PROMPTS_TWICE, [*prompts, record(1, 0.5, 0.45, 0.001, 2)], ())
    return found


def test_each_load_gives_its_medians() -> None:
    times = seen().times()
    assert [(each.num_tokens, round(each.ttft_s, 6), round(each.step_s, 6)) for each in times.prompts] == [
        (num_tokens, 0.1 + place, 0.09 + place) for place, num_tokens in enumerate(PROMPTS)
    ]
    assert [round(gap.gap_s, 6) for gap in times.gaps] == [round(0.02 + 0.001 * num, 6) for num in STREAMS]
    assert times.handoff_s == pytest.approx(0.005)


def test_what_a_neighbour_costs_is_its_turns_beside_its_pauses() -> None:
    times = seen().times()
    for turns in (times.streams_beside_prompts, times.streams_beside_streams):
        assert [(round(each.alone_s, 6), round(each.beside_s, 6)) for each in turns] == [(0.02, 0.03)]
    for turns in (times.prompts_beside_streams, times.prompts_beside_prompts):
        assert [(round(each.alone_s, 6), round(each.beside_s, 6)) for each in turns] == [(0.3, 0.36)]


def test_gaps_count_only_while_all_streams_ran() -> None:
    late = record(1, 0.0, 1.0, 0.02, ANSWER)
    found = Seen()
    slow_alone = record(0, 0.0, 0.1, 0.5, ANSWER)
    found.add("x", [slow_alone, late], ())
    # Of the slow answer two gaps lie within the other one.
    assert sorted(round(gap_s, 6) for gap_s in found.gaps_s["x"])[-2:] == [0.5, 0.5]
    assert len(found.gaps_s["x"]) == 2 + ANSWER - 2


def test_what_was_not_seen_is_said() -> None:
    found = seen()
    found.turns[STREAMS_BY_PROMPTS].clear()
    with pytest.raises(ConfigurationError, match="'streams beside prompts' was seen both"):
        found.times()
    found = seen()
    found.steps_s.clear()
    with pytest.raises(ConfigurationError, match="quieter machine"):
        found.times()
