"""Where a server says that the time of its requests went, over many of them. Pure."""

from collections.abc import Sequence

import msgspec

from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part, RequestTimeline

NUM_NAMED = 4  # stages in a sentence; the others are small


class StageShare(msgspec.Struct, frozen=True):
    """One stage of one part: mean seconds of a request, and share of that part's time over all of them."""

    stage: Stage
    mean_s: float
    share: float


def stage_shares(timelines: Sequence[RequestTimeline], part: Part) -> tuple[StageShare, ...]:
    """The largest first; of the choices that got the part's token."""
    totals: dict[Stage, float] = {}
    num_choices = 0
    for choice in (choice for timeline in timelines for choice in timeline.choices):
        if {Part.TTFT: choice.ttft_s, Part.FIRST_GAP: choice.first_gap_s, Part.STREAM: 0.0}[part] is None:
            continue
        num_choices += 1
        for each in choice.stages:
            if each.part is part:
                totals[each.stage] = totals.get(each.stage, 0.0) + each.seconds
    whole = sum(totals.values())
    shares = [StageShare(stage, total / num_choices, total / whole) for stage, total in totals.items()]
    return tuple(sorted(shares, key=lambda each: -each.share))


def in_words(shares: Sequence[StageShare]) -> str:
    """Such as "prefill 61 %, prefill_queue 22 %"."""
    return ", ".join(f"{each.stage.value} {100 * each.share:.0f} %" for each in shares[:NUM_NAMED])
