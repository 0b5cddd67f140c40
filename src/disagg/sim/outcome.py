"""What a simulation gives: a report of a page, and a record of each request."""

import enum
import hashlib
import math

import msgspec

from disagg.bench.percentiles import Summary, summary
from disagg.core.roles import Role
from disagg.protocol.messages import CounterValue
from disagg.sim.cluster import SimCluster
from disagg.sim.records import FAILED, FINISHED, PATHS, TURNED_AWAY, RecordTable
from disagg.sim.scenario import Slo
from disagg.sim.worker import SimWorker
from disagg.telemetry.metrics import (
    MOVES,
    PLACEMENTS,
    PREEMPTIONS,
    PUSH_RETRIES,
    REJECTIONS,
    RESERVATIONS_REFUSED,
    STEP_SECONDS,
    STEPS,
)
from disagg.telemetry.timeline import RequestTimeline, lay_out


class Stage(enum.StrEnum):
    """Where a request that missed its targets lost most, or what works hardest when none did."""

    ADMISSION = "admission"  # turned away or failed
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    HANDOFF = "handoff"  # hand-off and decode queue: the first gap
    DECODE = "decode"


class StepsOfKind(msgspec.Struct, frozen=True):
    """Steps by what they computed: prefill, decode, both, part."""

    kind: str
    num_steps: int
    mean_s: float


class WorkerUse(msgspec.Struct, frozen=True):
    """One worker over the run, all its incarnations."""

    name: str
    role: Role
    num_steps: int
    busy_share: float  # time in steps
    num_pushes: int
    steps: tuple[StepsOfKind, ...] = ()


class PathCount(msgspec.Struct, frozen=True):
    """Requests that ended well, by path."""

    path: str
    num_requests: int


class StageCount(msgspec.Struct, frozen=True):
    """Requests that missed a target, by where they lost most."""

    stage: Stage
    num_requests: int


class Report(msgspec.Struct, frozen=True):
    """Seconds are virtual. Failures and requests turned away count as missed."""

    seed: int
    fidelity: str
    num_requests: int
    num_finished: int
    num_failed: int
    num_turned_away: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    duration_s: float  # first arrival to last end
    ttft_s: Summary
    queue_s: Summary
    first_gap_s: Summary
    tpot_s: Summary
    itl_s: Summary
    attainment: float  # share within both targets
    ttft_attainment: float
    tpot_attainment: float
    goodput_per_s: float  # requests within both targets per second
    limiting_stage: Stage
    missed_by: tuple[StageCount, ...]
    paths: tuple[PathCount, ...]
    workers: tuple[WorkerUse, ...]
    fallbacks: tuple[CounterValue, ...]  # every placement, move, rejection, refusal, preemption by its reason
    num_events: int
    num_decisions: int
    decisions_digest: str


class Outcome:
    """The report, the records behind it, and timelines of the last requests as far as the scenario wants them."""

    def __init__(self, report: Report, records: RecordTable, timelines: tuple[RequestTimeline, ...] = ()) -> None:
        self.report = report
        self.records = records
        self.timelines = timelines  # the oldest first

    def to_bytes(self) -> bytes:
        """Equal for runs of one scenario and seed."""
        return msgspec.json.encode(self.report) + hashlib.blake2b(self.records.fingerprint()).digest()


_REASONS = tuple(
    metric.name for metric in (PLACEMENTS, MOVES, REJECTIONS, RESERVATIONS_REFUSED, PREEMPTIONS, PUSH_RETRIES)
)


def outcome_of(cluster: SimCluster, seed: int, num_decisions: int, digest: str) -> Outcome:
    """After its run."""
    scenario, records = cluster.scenario, cluster.records
    columns = records.columns
    ends = columns["end"]
    began_s = min(columns["arrived_s"], default=0.0)
    duration_s = max(columns["ended_s"], default=0.0) - began_s
    missed, met = _judge(records, scenario.slo)
    workers = _uses(cluster, cluster.heap.now_s - cluster.start_s)
    num_missed = {stage: count for stage, count in missed.items() if count}
    report = Report(
        seed=seed,
        fidelity=scenario.fidelity.value,
        num_requests=len(records),
        num_finished=sum(1 for end in ends if end == FINISHED),
        num_failed=sum(1 for end in ends if end == FAILED),
        num_turned_away=sum(1 for end in ends if end == TURNED_AWAY),
        num_prompt_tokens=int(sum(columns["num_prompt_tokens"])),
        num_cached_tokens=int(sum(columns["num_cached_tokens"])),
        num_output_tokens=int(sum(columns["num_output_tokens"])),
        duration_s=duration_s,
        ttft_s=_summary_of(records, "ttft_s"),
        queue_s=_summary_of(records, "queue_s"),
        first_gap_s=_summary_of(records, "first_gap_s"),
        tpot_s=_summary_of(records, "tpot_s"),
        itl_s=records.gaps.summary(),
        attainment=met[0] / max(1, len(records)),
        ttft_attainment=met[1] / max(1, len(records)),
        tpot_attainment=met[2] / max(1, len(records)),
        goodput_per_s=met[0] / duration_s if duration_s else 0.0,
        limiting_stage=_limiting(num_missed, workers),
        missed_by=tuple(StageCount(stage, count) for stage, count in num_missed.items()),
        paths=_paths(records),
        workers=workers,
        fallbacks=_fallbacks(cluster),
        num_events=cluster.heap.num_events,
        num_decisions=num_decisions,
        decisions_digest=digest,
    )
    tracks = cluster.tracks.last(scenario.max_timelines, tenant="")
    return Outcome(report, records, tuple(lay_out(track) for track in reversed(tracks)))


def _summary_of(records: RecordTable, name: str) -> Summary:
    return summary(value for value in records.columns[name] if not math.isnan(value))


def _judge(records: RecordTable, slo: Slo) -> tuple[dict[Stage, int], tuple[int, int, int]]:
    """Missed requests by stage; how many met both targets, TTFT's, TPOT's."""
    missed = dict.fromkeys(Stage, 0)
    num_both = num_ttft = num_tpot = 0
    names = ("end", "queue_s", "ttft_s", "first_gap_s", "tpot_s", "num_output_tokens")
    for end, queue_s, ttft_s, first_gap_s, tpot_s, num in zip(*(records.columns[n] for n in names), strict=True):
        if end != FINISHED:
            missed[Stage.ADMISSION] += 1
            continue
        is_ttft, is_tpot = ttft_s <= slo.ttft_s, tpot_s <= slo.tpot_s
        num_ttft += is_ttft
        num_tpot += is_tpot
        num_both += is_ttft and is_tpot
        if not is_ttft:
            missed[Stage.PREFILL_QUEUE if queue_s > ttft_s / 2 else Stage.PREFILL] += 1
        elif not is_tpot:
            # Without its first gap, would the answer have been in time?
            rest_s = (tpot_s * (num - 1) - first_gap_s) / max(1, num - 2)
            missed[Stage.HANDOFF if rest_s <= slo.tpot_s else Stage.DECODE] += 1
    return missed, (num_both, num_ttft, num_tpot)


def _limiting(missed: dict[Stage, int], workers: tuple[WorkerUse, ...]) -> Stage:
    if missed:
        return max(missed, key=lambda stage: missed[stage])
    shares: dict[Role, list[float]] = {}
    for worker in workers:
        shares.setdefault(worker.role, []).append(worker.busy_share)
    means = {role: sum(values) / len(values) for role, values in shares.items()}
    return Stage.PREFILL if max(means, key=lambda role: means[role]) is Role.PREFILL else Stage.DECODE


def _uses(cluster: SimCluster, duration_s: float) -> tuple[WorkerUse, ...]:
    lives: dict[str, list[SimWorker]] = {}
    for worker in (*cluster.ended, *cluster.workers.values()):
        lives.setdefault(worker.worker_id, []).append(worker)
    return tuple(
        WorkerUse(
            name=name,
            role=each[0].card.role,
            num_steps=sum(worker.num_steps for worker in each),
            busy_share=sum(worker.busy_s for worker in each) / duration_s if duration_s else 0.0,
            num_pushes=sum(worker.num_pushes for worker in each),
            steps=_steps(each),
        )
        for name, each in sorted(lives.items())
    )


def _steps(lives: list[SimWorker]) -> tuple[StepsOfKind, ...]:
    nums: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for worker in lives:
        for name, kind, total in worker.scheduler.counters.items():
            totals = {STEPS.name: nums, STEP_SECONDS.name: seconds}.get(name)
            if totals is not None:
                totals[kind] = totals.get(kind, 0.0) + total
    return tuple(StepsOfKind(kind, round(num), seconds[kind] / num) for kind, num in sorted(nums.items()))


def _paths(records: RecordTable) -> tuple[PathCount, ...]:
    counts = [0] * len(PATHS)
    for end, path in zip(records.columns["end"], records.columns["path"], strict=True):
        counts[int(path)] += end == FINISHED
    return tuple(PathCount(path, count) for path, count in zip(PATHS, counts, strict=True) if count)


def _fallbacks(cluster: SimCluster) -> tuple[CounterValue, ...]:
    totals: dict[tuple[str, str], float] = {}
    workers = (*cluster.ended, *cluster.workers.values())
    for counters in (cluster.dispatcher.counters, *(worker.scheduler.counters for worker in workers)):
        for name, label, total in counters.items():
            if name in _REASONS:
                totals[(name, label)] = totals.get((name, label), 0.0) + total
    return tuple(CounterValue(name, label, total) for (name, label), total in sorted(totals.items()))
