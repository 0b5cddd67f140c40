"""Bounded search: every candidate by its closed form, the best by short simulations, the survivors by longer ones.

Each round keeps fewer and looks longer (successive halving). Mixed and split candidates do not compete for places: the
best mixed one is what everything else is compared with, so it is looked for as hard; where devices are to be saved, a
mixed one on exactly the devices of the best split is looked at as well.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.planner.candidate import Candidate, PoolPlan
from disagg.planner.estimate import MOST_STREAMS, Estimator, Target
from disagg.planner.fleet import Cut, Fleet, Steps
from disagg.planner.floors import check_floors
from disagg.planner.measure import Bench, Trial
from disagg.planner.traffic import Traffic

PREFILL_CHUNKS = (2048, 8192)
MIXED_CHUNKS = (256, 512, 1024, 2048)
WHOLE_CHUNK = 8192  # of a step without streams
LOCAL_TOKENS = (0, 512)
SHORT_SHARE = 0.05  # of prompts that are short, from which it is worth looking
SLOW_GAP = 2.0  # first gaps of so many TPOT are felt
COUNTS_AN_OCTAVE = 16  # of workers, between a power of two and the next
SIMULATED = 3  # of each kind in the first round
SHORT = 0.4  # of the last round's requests
FLATTERED = 1.2  # short runs end before queues and caches fill: they count up to so many times the closed form
SECOND_LOOK = 0.85  # of what was expected; less, and the runner-up gets a long run as well


class Objective(enum.StrEnum):
    """What a plan makes most of."""

    GOODPUT = "goodput"  # of all devices together
    PER_GPU = "per-gpu"
    PER_DOLLAR = "per-dollar"


class Effort(msgspec.Struct, frozen=True):
    """How long to look. num_requests: of a run in the last round."""

    num_requests: int = 600
    num_short_runs: int = 2  # of each candidate of the first round
    num_runs: int = 3
    num_extra: int = 3  # where these found no rate that holds, or none that does not


class Ranked(msgspec.Struct, frozen=True):
    """A candidate by its closed form."""

    candidate: Candidate
    estimate_per_s: float
    bound_by: str


class Searched(msgspec.Struct, frozen=True):
    """trials: those looked at longest first, then best first. is_cut_short: the time limit ended it.

    equal_mixed: of the trials, the mixed one on the devices of the best split; None where both have the whole fleet.
    """

    num_candidates: int
    num_runs: int
    trials: tuple[Trial, ...]
    is_cut_short: bool
    equal_mixed: Candidate | None = None


class Watch(msgspec.Struct, frozen=True):
    """Who wants to know how far it is, and whether time is over. Without one: nobody, never."""

    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None
    is_over: Callable[[], bool] = lambda: False


class Search:
    """For one fleet, traffic, target. Equal arguments and seeds give equal answers unless time runs out."""

    def __init__(
        self,
        fleet: Fleet,
        traffic: Traffic,
        target: Target,
        *,
        objective: Objective = Objective.GOODPUT,
        effort: Effort | None = None,
        seed: int = 0,
    ) -> None:
        """Raises ConfigurationError where the model does not fit or a target lies below a physical floor."""
        self.fleet = fleet
        self.traffic = traffic
        self.target = target
        self.objective = objective
        self.effort = effort or Effort()
        self.steps = Steps(fleet)
        check_floors(self.steps, traffic, target)
        if objective is Objective.PER_DOLLAR:
            unpriced = [gpus.device for gpus in fleet.gpus if not gpus.usd_per_hour]
            if unpriced:
                raise ConfigurationError(f"no price of {', '.join(unpriced)} is known: give it, as in h100=16@2.5")
        self.estimator = Estimator(self.steps, traffic, target)
        self.bench = Bench(self.steps, traffic, target, seed)

    def score(self, candidate: Candidate, goodput_per_s: float) -> float:
        """What is made most of."""
        if self.objective is Objective.PER_GPU:
            return goodput_per_s / candidate.num_gpus
        if self.objective is Objective.PER_DOLLAR:
            return goodput_per_s / candidate.usd_per_hour(self.fleet)
        return goodput_per_s

    def merit(self, candidate: Candidate, goodput_per_s: float) -> tuple[bool, float]:
        """What is asked must be carried; then the score counts."""
        return goodput_per_s >= self.traffic.rate_per_s, self.score(candidate, goodput_per_s)

    def ranked(self) -> tuple[Ranked, ...]:
        """All candidates that carry anything, best first by closed form. Equal ones: fewer devices, then by name."""
        rows: list[Ranked] = []
        for candidate in self.candidates():
            estimate = self.estimator.of(candidate)
            if estimate.goodput_per_s > 0:
                rows.append(Ranked(candidate, estimate.goodput_per_s, estimate.bound_by))
        return tuple(sorted(rows, key=self._order))

    def run(self, watch: Watch | None = None) -> Searched:
        """Raises ConfigurationError where no candidate carries anything."""
        watch = watch or Watch()
        ranked = self.ranked()
        if not ranked:
            raise ConfigurationError(
                f"none of the ways to cut {self.fleet.num_gpus} devices keeps {self.target.share:.0%} of requests "
                f"within TTFT {self.target.slo.ttft_s:g} s and TPOT {self.target.slo.tpot_s:g} s at any rate; "
                "allow more or give more devices"
            )
        kinds = [[row for row in ranked if row.candidate.is_mixed is is_mixed] for is_mixed in (True, False)]
        entered = [_unlike(rows)[:SIMULATED] for rows in kinds]
        rounds = _Rounds(self, watch, sum(len(rows) for rows in entered) + 5)
        for rows in entered:
            for row in rows:
                rounds.look(row.candidate, row.estimate_per_s, SHORT)
        orders = [_Order(self, rounds, rows) for rows in entered if rows]
        for order in orders:  # both kinds before any second thoughts: time may end
            order.look()
        for order in orders:
            for variant in self._variants(order.trials[0]):
                rounds.look(variant, order.expected[order.trials[0].candidate], 1.0)
            while order.is_disappointing:
                order.look()
        equal = self._equal_mixed(rounds)
        return Searched(len(ranked), self.bench.num_runs, rounds.finish(), rounds.is_cut_short, equal)

    def _equal_mixed(self, rounds: "_Rounds") -> Candidate | None:
        """The best on the best split's devices, looked at as long; where the sum counts, both have all devices."""
        split = rounds.best(lambda each: not each.is_mixed)
        if split is None or self.objective is Objective.GOODPUT:
            return None
        usage = split.candidate.usage
        equal = self.mixed_on(split.candidate)
        if equal is not None and not rounds.has_looked_long(equal):
            rounds.look(equal, self.estimator.of(equal).goodput_per_s, 1.0)
        best = rounds.best(lambda each: each.is_mixed and each.usage == usage)
        return best.candidate if best is not None else equal

    # --- candidates ---------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        cuts = self.steps.cuts()
        streams = {cut: self.estimator.streams_within(cut) for cut in cuts}
        yield from (each for each in self._side_by_side(self.fleet) if len(each.pools) > 1)
        for cut in cuts:
            if streams[cut]:
                for chunk in MIXED_CHUNKS:
                    for count in self._counts(cut, {}):
                        pool = PoolPlan(Role.MIXED, count, cut, WHOLE_CHUNK, chunk, _limit(streams[cut]))
                        yield Candidate((pool,))
        for prefill in cuts:
            for decode in cuts:
                if streams[decode]:
                    yield from self._splits(prefill, decode, _limit(streams[decode]))

    def mixed_on(self, candidate: Candidate) -> Candidate | None:
        """The best mixed one, by closed form, on the devices that this one uses; None where none carries anything."""
        usage = candidate.usage
        gpus = tuple(
            msgspec.structs.replace(each, count=usage[each.device]) for each in self.fleet.gpus if each.device in usage
        )
        found = self._side_by_side(msgspec.structs.replace(self.fleet, gpus=gpus, budget_usd_per_hour=0.0))
        return max(found, key=lambda each: (self.estimator.of(each).goodput_per_s, each), default=None)

    def _side_by_side(self, fleet: Fleet) -> Iterator[Candidate]:
        """All devices mixed, a pool of each kind: for each chunk the cuts that carry most; what they carry adds up."""
        for chunk in MIXED_CHUNKS:
            pools: list[PoolPlan] = []
            for gpus in fleet.gpus:
                used = {pool.cut.device: pool.num_gpus for pool in pools}
                rows = [
                    (self.estimator.mixed_rate(cut, chunk, most), cut, most)
                    for cut in self.steps.cuts()
                    if cut.device == gpus.device and (most := fleet.most(cut, used))
                ]
                rate, cut, most = max(rows, default=(0.0, None, 0))
                if cut is not None and rate > 0:
                    limit = _limit(self.estimator.streams_within(cut))
                    pools.append(PoolPlan(Role.MIXED, most, cut, WHOLE_CHUNK, chunk, limit))
            if pools:
                yield Candidate(tuple(pools))

    def _splits(self, prefill: Cut, decode: Cut, max_running: int) -> Iterator[Candidate]:
        for num_prefill in counts_up_to(self.fleet.most(prefill, {})):
            used = {prefill.device: num_prefill * prefill.num_gpus}
            for num_decode in self._counts(decode, used):
                for chunk in PREFILL_CHUNKS:
                    first = PoolPlan(Role.PREFILL, num_prefill, prefill, chunk)
                    second = PoolPlan(Role.DECODE, num_decode, decode, WHOLE_CHUNK, max_running=max_running)
                    yield Candidate((first, second), LOCAL_TOKENS[0])

    def _counts(self, cut: Cut, used: dict[str, int]) -> Iterable[int]:
        """As many as fit; where the sum counts only the most of them matters."""
        most = self.fleet.most(cut, used)
        return counts_up_to(most) if self.objective is not Objective.GOODPUT else [most] if most else []

    def _order(self, row: Ranked) -> tuple[bool, float, int, Candidate]:
        is_enough, score = self.merit(row.candidate, row.estimate_per_s)
        return not is_enough, -score, row.candidate.num_gpus, row.candidate

    def _variants(self, trial: Trial) -> Iterator[Candidate]:
        """Mixed: the next smaller chunk where TPOT gives out, else the next larger. Split: short prompts read by
        decode, where there are some; a narrower wire, where hand-offs are felt."""
        candidate = trial.candidate
        if candidate.is_mixed:
            yield from self._other_chunk(trial)
            return
        short = sum(1 for new in self.traffic.uncached if new <= LOCAL_TOKENS[1])
        if short > SHORT_SHARE * len(self.traffic.uncached):
            yield msgspec.structs.replace(candidate, local_prefill_tokens=LOCAL_TOKENS[1])
        point = trial.nearest(trial.goodput_per_s)
        is_slow = self.estimator.of(candidate).bound_by == "link" or point.first_gap_s > SLOW_GAP * point.tpot_s
        if is_slow and self.fleet.kv.bytes_each > 1:
            yield msgspec.structs.replace(candidate, kv_wire=KvWire.INT8)

    def _other_chunk(self, trial: Trial) -> Iterator[Candidate]:
        pools = trial.candidate.pools
        failed = [point for point in trial.points if point.attainment < self.target.share]
        is_slow_token = any(point.tpot_s > self.target.slo.tpot_s for point in failed)
        place = MIXED_CHUNKS.index(pools[0].mixed_chunk_tokens) + (-1 if is_slow_token else 1)
        if 0 <= place < len(MIXED_CHUNKS):
            chunk = MIXED_CHUNKS[place]
            yield Candidate(tuple(msgspec.structs.replace(pool, mixed_chunk_tokens=chunk) for pool in pools))


class _Rounds:
    """What was looked at so far."""

    def __init__(self, search: Search, watch: Watch, total: int) -> None:
        self._search = search
        self._watch = watch
        self._total = total
        self._done = 0
        self._short: dict[Candidate, Trial] = {}
        self._long: dict[Candidate, Trial] = {}
        self.is_cut_short = False

    def look(self, candidate: Candidate, guess_per_s: float, share: float) -> Trial:
        """Once time is over only what has not been looked at at all gets one more run."""
        search, effort = self._search, self._search.effort
        self._watch.on_progress(self._done, max(self._total, self._done + 1), candidate.name)
        is_long = share == 1.0
        num_runs = effort.num_runs if is_long else effort.num_short_runs
        if self._watch.is_over():
            self.is_cut_short = True
            if candidate in self._short:
                return self._short[candidate]
            num_runs, share, is_long = 1, SHORT, False
        num = search.bench.num_requests(guess_per_s, share, effort.num_requests)
        extra = effort.num_extra if is_long else 0
        trial = search.bench.goodput(candidate, guess_per_s, num, num_runs, extra, self._watch.is_over)
        if self._watch.is_over():
            self.is_cut_short = True
            if not trial.goodput_per_s and candidate in self._short:
                return self._short[candidate]  # nothing has held yet, which says less than the short look
        (self._long if is_long else self._short)[candidate] = trial
        self._done += 1
        return trial

    def guess(self, row: Ranked) -> float:
        """Where to look next: what a short look found, or below everything tried where nothing held."""
        trial = self._short[row.candidate]
        return trial.goodput_per_s or 0.7 * min(point.rate_per_s for point in trial.points)

    def has_looked_long(self, candidate: Candidate) -> bool:
        return candidate in self._long

    def best(self, is_wanted: Callable[[Candidate], bool]) -> Trial | None:
        """Of those looked at long, else of the others."""
        for seen in (self._long, self._short):
            trials = [trial for each, trial in seen.items() if is_wanted(each)]
            if trials:
                return max(trials, key=lambda trial: self._search.merit(trial.candidate, trial.goodput_per_s))
        return None

    def best_long(self, is_mixed: bool) -> tuple[bool, float]:
        """Highest merit of a kind among long looks."""
        trials = [trial for each, trial in self._long.items() if each.is_mixed is is_mixed]
        merits = (self._search.merit(trial.candidate, trial.goodput_per_s) for trial in trials)
        return max(merits, default=(False, 0.0))

    def finish(self) -> tuple[Trial, ...]:
        """Looked at longest first, then by score."""
        self._watch.on_progress(max(1, self._done), max(1, self._done), "")
        trials = {**{each: (1, trial) for each, trial in self._short.items()}}
        trials |= {each: (0, trial) for each, trial in self._long.items()}

        def order(row: tuple[int, Trial]) -> tuple[int, bool, float]:
            is_enough, score = self._search.merit(row[1].candidate, row[1].goodput_per_s)
            return row[0], not is_enough, -score

        return tuple(trial for _, trial in sorted(trials.values(), key=order))


class _Order:
    """Candidates of one kind in the order of what short looks let expect, for long looks."""

    def __init__(self, search: Search, rounds: _Rounds, rows: list[Ranked]) -> None:
        self._search = search
        self._rounds = rounds
        self.expected = {row.candidate: min(rounds.guess(row), FLATTERED * row.estimate_per_s) for row in rows}
        self._left = sorted(self.expected, key=lambda each: (search.merit(each, self.expected[each]), each))
        self.trials: list[Trial] = []

    def look(self) -> None:
        """At the next best."""
        candidate = self._left.pop()
        self.trials.append(self._rounds.look(candidate, self.expected[candidate], 1.0))

    @property
    def is_disappointing(self) -> bool:
        """The next best promises clearly more than the best has shown."""
        if not self._left or self._rounds.is_cut_short:
            return False
        candidate = self._left[-1]
        is_enough, score = self._search.merit(candidate, self.expected[candidate])
        return self._rounds.best_long(candidate.is_mixed) < (is_enough, SECOND_LOOK * score)


def counts_up_to(most: int) -> Iterator[int]:
    """1 to 32 by one, to 64 by two, to 128 by four and so on: of a large fleet one worker more tells nothing new."""
    count = 1
    while count <= most:
        yield count
        count += max(1, (1 << count.bit_length()) // COUNTS_AN_OCTAVE // 2)


def _limit(num_streams: int) -> int:
    """max_running: the streams that keep TPOT, with some room above the mean; a step beyond is no use."""
    return min(MOST_STREAMS, max(8, -(-num_streams * 5 // 4)))


def _unlike(rows: list[Ranked]) -> list[Ranked]:
    """The best of each set of cuts and ratio of counts first: near twins tell little; then the others."""
    seen: set[tuple[tuple[Cut, int], ...]] = set()
    first: list[Ranked] = []
    later: list[Ranked] = []
    for row in rows:
        pools = row.candidate.pools
        divisor = math.gcd(*(pool.count for pool in pools))
        key = tuple((pool.cut, pool.count // divisor) for pool in pools)
        (later if key in seen else first).append(row)
        seen.add(key)
    return first + later
