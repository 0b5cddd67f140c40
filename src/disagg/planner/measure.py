"""What a candidate does with traffic at a rate: one simulation, judged after its warm-up."""

import math
from bisect import bisect_right
from collections.abc import Callable

import msgspec

from disagg.bench.percentiles import percentile
from disagg.planner.candidate import Candidate, worker_specs
from disagg.planner.estimate import Target
from disagg.planner.fleet import Steps
from disagg.planner.traffic import Traffic
from disagg.sim.outcome import Outcome, Stage
from disagg.sim.records import FINISHED
from disagg.sim.scenario import Fidelity, Scenario, WorkerDies
from disagg.sim.simulate import simulate
from disagg.sim.validation.scenario import goodput_per_device

WARM_UP = 0.3  # of the requests: they meet an empty cluster and do not count
ANSWER_SPANS = 1.5  # a run takes so many answers' time
TTFT_SPANS = 5.0  # and so many TTFT targets: a queue that grows must have time to show
LEAST = 60
MOST_TOKENS = 4_000_000  # of a run, prompts and answers: longer ones take too long to play
STEP = 1.2  # from a rate that holds to the next one tried
STEEPEST = 0.4  # from one that does not
CALM_CV = 4.0  # gaps that vary more than this need longer runs


class Point(msgspec.Struct, frozen=True):
    """One run. Percentiles are at the target's share, of requests that ended well."""

    rate_per_s: float
    num_requests: int  # judged
    attainment: float
    ttft_s: float
    tpot_s: float
    first_gap_s: float
    limiting: Stage
    cached_share: float  # of prompt tokens
    slo_scale: float  # both targets times this would be kept; infinity where too many failed


class Trial(msgspec.Struct, frozen=True):
    """A candidate and all that was seen of it. goodput_per_s: highest rate that holds, between points by a line.

    num_requests: of each run; equal numbers mean the same requests.
    """

    candidate: Candidate
    num_requests: int
    points: tuple[Point, ...]
    goodput_per_s: float

    def nearest(self, rate_per_s: float) -> Point:
        return min(self.points, key=lambda point: abs(point.rate_per_s - rate_per_s))


class Bench:
    """Runs candidates; the same arguments give the same points."""

    def __init__(self, steps: Steps, traffic: Traffic, target: Target, seed: int) -> None:
        self.steps = steps
        self.traffic = traffic
        self.target = target
        self.seed = seed
        self.num_runs = 0
        longest = max(request.num_prompt_tokens + request.num_output_tokens for request in traffic.requests)
        self._cv = traffic.gap_cv
        self._max_context = max(1 << 17, longest + 1)
        self._known: dict[tuple[Candidate, float, int, str], Point] = {}

    def num_requests(self, rate_per_s: float, share: float, most: int) -> int:
        """How many make a run in which a queue can be seen to grow, or a share of that run."""
        slo = self.target.slo
        bursts = max(1.0, self._cv / CALM_CV)
        span_s = bursts * TTFT_SPANS * slo.ttft_s + ANSWER_SPANS * self.traffic.mean_output * slo.tpot_s
        each = self.traffic.mean_prompt + self.traffic.mean_output
        most = min(most, round(MOST_TOKENS / each))
        return max(LEAST, round(share * min(most, rate_per_s * span_s / (1 - WARM_UP))))

    def run(self, candidate: Candidate, rate_per_s: float, num_requests: int, dead: str = "") -> Point:
        """dead: name of a worker that is lost as the run begins."""
        key = (candidate, rate_per_s, num_requests, dead)
        if key not in self._known:
            scenario = Scenario(
                workers=worker_specs(candidate, self.steps, self._max_context),
                work=self.traffic.window(num_requests, rate_per_s),
                slo=self.target.slo,
                fidelity=Fidelity.LARGE,
                faults=(WorkerDies(0.0, dead),) if dead else (),
                local_prefill_tokens=candidate.local_prefill_tokens,
            )
            self.num_runs += 1
            self._known[key] = judged(simulate(scenario, self.seed), rate_per_s, self.target)
        return self._known[key]

    def goodput(
        self,
        candidate: Candidate,
        guess_per_s: float,
        num_requests: int,
        num_runs: int,
        num_extra: int = 0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Trial:
        """Up from a rate that holds, down from one that does not, then between the two.

        num_extra more runs are made while either a rate that holds or one that does not is still to be found. Once it
        is over no run begins but the first. No rate is tried at which a run of so many requests would show nothing.
        """
        points: list[Point] = []
        slo = self.target.slo
        rate = min(guess_per_s, self._shown_per_s(num_requests, slo.ttft_s, slo.tpot_s))
        holds = fails = 0.0
        while len(points) < num_runs or (len(points) < num_runs + num_extra and not (holds and fails)):
            point = self.run(candidate, rate, num_requests)
            points.append(point)
            if is_over():
                break
            if point.attainment >= self.target.share:
                holds = max(holds, rate)
            else:
                fails = min(fails or rate, rate)
            if holds and fails:
                rate = (holds * fails) ** 0.5 if fails > holds else holds
            elif holds:
                rate = min(holds * STEP ** len(points), self._shown_per_s(num_requests, point.ttft_s, point.tpot_s))
                if rate <= holds:
                    break
            else:
                rate = fails * min(1 / STEP, max(STEEPEST, point.attainment / self.target.share))
        return Trial(candidate, num_requests, tuple(points), goodput_of(points, self.target.share))

    def _shown_per_s(self, num_requests: int, ttft_s: float, tpot_s: float) -> float:
        """Above this rate all requests of a run come before the first answers end: streams do not add up as they would
        under a load that lasts."""
        return num_requests / (ttft_s + self.traffic.mean_output * tpot_s)


def goodput_of(points: list[Point], share: float) -> float:
    """Highest rate at which the share is attained, between measured ones by a straight line; 0 where none holds."""
    if not points:
        return 0.0
    return goodput_per_device([(point.rate_per_s, point.attainment) for point in points], share)


def judged(outcome: Outcome, rate_per_s: float, target: Target) -> Point:
    """Requests that came after the warm-up."""
    columns, slo = outcome.records.columns, target.slo
    begin_s = sorted(columns["arrived_s"])[int(WARM_UP * len(outcome.records))]
    names = ("arrived_s", "end", "ttft_s", "tpot_s", "first_gap_s")
    rows = [row for row in zip(*(columns[name] for name in names), strict=True) if row[0] >= begin_s]
    ended = [row for row in rows if row[1] == FINISHED]
    scales = sorted(max(ttft_s / slo.ttft_s, tpot_s / slo.tpot_s) for _, _, ttft_s, tpot_s, _ in ended)
    met = bisect_right(scales, 1.0)
    num_wanted = max(1, math.ceil(target.share * len(rows) - 1e-9))
    scale = scales[num_wanted - 1] if num_wanted <= len(scales) else math.inf
    ttft_s, tpot_s, gap_s = (
        percentile(sorted(row[place] for row in ended if row[place] == row[place]), target.share) for place in (2, 3, 4)
    )
    report = outcome.report
    cached = report.num_cached_tokens / max(1, report.num_prompt_tokens)
    attainment = met / len(rows)
    return Point(rate_per_s, len(rows), attainment, ttft_s, tpot_s, gap_s, report.limiting_stage, cached, scale)
