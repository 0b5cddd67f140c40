"""Live and simulated timelines of the same requests beside each other: which stage is it that differs?

Both are laid out by the same code from what the same dispatcher and schedulers note, so a stage means the same on both
sides. Seconds that the table names nowhere (HTTP, router, network, what was not reported) are in the `others` of their
part: the stages of a part add up to it, and so do their means.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from disagg.sim.outcome import WorkerUse
from disagg.telemetry import metrics
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import ChoiceTimeline, Part, RequestTimeline

Metrics = Mapping[tuple[str, str, str], float]  # as harness.scrape() gives them
Seconds = Callable[[ChoiceTimeline], float | None]  # None: it had no such thing

NAMED = {
    Part.TTFT: (Stage.PREFILL_QUEUE, Stage.RESERVATION, Stage.PREFILL),
    Part.FIRST_GAP: (Stage.TRANSFER, Stage.DECODE_QUEUE, Stage.FIRST_STEP),
}


class StageRow(NamedTuple):
    """One stage of requests of one path; seconds."""

    path: str
    name: str
    live_p50: float
    simulated_p50: float
    live_mean: float
    simulated_mean: float

    @property
    def difference(self) -> float:
        """Of the means: those of a part's stages add up to the part's."""
        return self.simulated_mean - self.live_mean


class StepRow(NamedTuple):
    """Steps of one kind on workers of one role: how many, and how long on the mean."""

    role: str
    kind: str
    num: float
    mean_s: float


def stage_rows(live: Sequence[RequestTimeline], simulated: Sequence[RequestTimeline]) -> list[StageRow]:
    """By path, of answers of three tokens or more."""
    one, other = _by_path(live), _by_path(simulated)
    rows: list[StageRow] = []
    for path in sorted(one.keys() & other.keys()):
        for name, seconds in _measures().items():
            mine = [value for each in one[path] if (value := seconds(each)) is not None]
            theirs = [value for each in other[path] if (value := seconds(each)) is not None]
            if max((*mine, *theirs), default=0.0) > 0.0:
                medians = statistics.median(mine), statistics.median(theirs)
                rows.append(StageRow(path, name, *medians, statistics.fmean(mine), statistics.fmean(theirs)))
    return rows


def num_by_path(timelines: Iterable[RequestTimeline]) -> dict[str, int]:
    return {path: len(choices) for path, choices in sorted(_by_path(timelines).items())}


def live_steps(before: Metrics, after: Metrics) -> list[StepRow]:
    """Of what the workers computed between two readings; seconds are those of the engine alone."""
    totals: dict[tuple[str, str], list[float]] = {}
    for (name, worker, kind), value in after.items():
        if worker and name in (metrics.STEPS.name, metrics.STEP_SECONDS.name):
            total = totals.setdefault((_role(worker), kind), [0.0, 0.0])
            total[name == metrics.STEP_SECONDS.name] += value - before.get((name, worker, kind), 0.0)
    return _step_rows(totals)


def simulated_steps(workers: Iterable[WorkerUse]) -> list[StepRow]:
    totals: dict[tuple[str, str], list[float]] = {}
    for use in workers:
        for each in use.steps:
            total = totals.setdefault((_role(use.name), each.kind), [0.0, 0.0])
            total[0] += each.num_steps
            total[1] += each.num_steps * each.mean_s
    return _step_rows(totals)


def lines_of(
    live: Sequence[RequestTimeline],
    simulated: Sequence[RequestTimeline],
    steps: Sequence[StepRow],
    simulated_use: Sequence[StepRow],
) -> list[str]:
    """The table as text."""
    heads = f"{'live':>9}{'simulated':>11}"
    found = [f"{'stage, ms':30}{heads} median {heads} mean {'difference':>11}"]
    for row in stage_rows(live, simulated):
        medians = f"{1e3 * row.live_p50:9.1f}{1e3 * row.simulated_p50:11.1f}        "
        means = f"{1e3 * row.live_mean:9.1f}{1e3 * row.simulated_mean:11.1f}      {1e3 * row.difference:+11.1f}"
        found.append(f"{f'{row.path}: {row.name}':30}{medians}{means}")
    found.append(f"requests by path: live {num_by_path(live)}, simulated {num_by_path(simulated)}")
    for name, rows in (("live, engine alone", steps), ("simulated, as served", simulated_use)):
        text = ", ".join(f"{row.role} {row.kind} {row.num:.0f} x {1e3 * row.mean_s:.1f} ms" for row in rows)
        found.append(f"steps {name}: {text}")
    return found


def _measures() -> dict[str, Seconds]:
    """In the order of a request's life."""
    found: dict[str, Seconds] = {}
    for part, stages in NAMED.items():
        for stage in stages:
            found[stage.value.replace("_", " ")] = partial(_spent, part, stage)
        found[f"others of {part.value}"] = partial(_others, part, stages)
        found[part.value] = partial(ChoiceTimeline.seconds, part=part)
    found["later gap"] = _later_gap_s
    return found


def _spent(part: Part, stage: Stage, each: ChoiceTimeline) -> float:
    return each.seconds(part, stage)


def _others(part: Part, stages: Sequence[Stage], each: ChoiceTimeline) -> float:
    return each.seconds(part) - sum(each.seconds(part, stage) for stage in stages)


def _later_gap_s(each: ChoiceTimeline) -> float | None:
    num_gaps = each.num_output_tokens - 2
    return each.seconds(Part.STREAM) / num_gaps if num_gaps > 0 else None


def _by_path(timelines: Iterable[RequestTimeline]) -> dict[str, list[ChoiceTimeline]]:
    found: dict[str, list[ChoiceTimeline]] = {}
    for timeline in timelines:
        for each in timeline.choices:
            if each.num_output_tokens > 2:
                found.setdefault(each.path, []).append(each)
    return found


def _role(worker: str) -> str:
    return worker.rpartition("-")[0] or worker


def _step_rows(totals: Mapping[tuple[str, str], Sequence[float]]) -> list[StepRow]:
    return [StepRow(role, kind, num, seconds / num) for (role, kind), (num, seconds) in sorted(totals.items()) if num]
