"""Is splitting prefill and decode worth it for this traffic on this hardware? An answer with its reasons."""

import enum

import msgspec

from disagg.planner.estimate import Estimator
from disagg.planner.measure import Point, Trial
from disagg.planner.search import Search, Searched, Watch
from disagg.planner.shortfall import shortfall

WORTH = 1.1  # goodput of the split over mixed from which two kinds of worker are worth running
ROOM = 1.2  # goodput over the asked rate that is enough to grow into
THUMB_RATE = 100.0  # requests/s
THUMB_PROMPT = 512.0  # tokens
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # of prompt lengths, to find where the answer turns


class Verdict(enum.StrEnum):
    """What to run."""

    MIXED = "mixed"
    DISAGGREGATED = "disaggregated"


class LengthPoint(msgspec.Struct, frozen=True):
    """Goodput of the split over mixed if prompts had this mean, each cut anew for it."""

    mean_prompt: float
    gain: float  # nan where neither carries anything


class Advice(msgspec.Struct, frozen=True):
    """mixed, split: the best of each on equal hardware; None where no such one carries anything. gain is split over
    mixed. at_mixed, at_split: at the asked rate."""

    verdict: Verdict
    is_enough: bool  # the fleet carries the asked rate at all
    reasons: tuple[str, ...]
    traffic: str
    rate_per_s: float
    mean_prompt: float
    mean_output: float
    cached_share: float  # of prompt tokens, with an endless cache
    mixed: Trial | None
    split: Trial | None
    at_mixed: Point | None
    at_split: Point | None
    gain: float
    break_even_rate_per_s: float  # above it mixed misses; nan where no rate is
    break_even_prompt: (
        float  # mean tokens from which the split carries WORTH times as much; nan where that is nowhere in range
    )
    by_length: tuple[LengthPoint, ...]
    thumb: str
    searched: Searched


def advise(search: Search, watch: Watch | None = None) -> Advice:
    """Raises ConfigurationError as Search.run does."""
    searched = search.run(watch)
    traffic = search.traffic
    mixed = _best(searched, is_mixed=True)
    split = _best(searched, is_mixed=False)
    rate, good = traffic.rate_per_s, (_goodput(mixed), _goodput(split))
    gain = good[1] / good[0] if good[0] else (float("inf") if good[1] else float("nan"))
    verdict, reasons = _judge(rate, good, gain)
    points = [_at(search, trial, rate) for trial in (mixed, split)]
    reasons += _why(mixed, split, points[0], points[1])
    if max(good) < rate:
        reasons += shortfall(search, points[0], points[1])
    by_length = _by_length(search, mixed, split)
    return Advice(
        verdict=verdict,
        is_enough=max(good) >= rate,
        reasons=tuple(reasons),
        traffic=traffic.name,
        rate_per_s=rate,
        mean_prompt=traffic.mean_prompt,
        mean_output=traffic.mean_output,
        cached_share=1 - traffic.mean_uncached / traffic.mean_prompt,
        mixed=mixed,
        split=split,
        at_mixed=points[0],
        at_split=points[1],
        gain=gain,
        break_even_rate_per_s=good[0] if good[1] > good[0] else float("nan"),
        break_even_prompt=_turn(by_length),
        by_length=by_length,
        thumb=rule_of_thumb(rate, traffic.mean_prompt),
        searched=searched,
    )


def rule_of_thumb(rate_per_s: float, mean_prompt: float) -> str:
    """What people say without looking."""
    few, short = rate_per_s < THUMB_RATE, mean_prompt < THUMB_PROMPT
    if not few and not short:
        return f"worth a try ({rate_per_s:.3g} requests/s, {mean_prompt:.0f} tokens)"
    why = [f"{rate_per_s:.3g} requests/s is below {THUMB_RATE:g}"] if few else []
    why += [f"prompts of {mean_prompt:.0f} tokens are below {THUMB_PROMPT:g}"] if short else []
    return f"don't ({', '.join(why)})"


def _judge(rate: float, good: tuple[float, float], gain: float) -> tuple[Verdict, list[str]]:
    """good: of mixed and of the split."""
    if max(good) <= 0:
        return Verdict.MIXED, ["nothing that was simulated keeps the targets: give more devices or allow more"]
    carries = f"mixed carries {good[0]:.3g} requests/s within the targets, the split {good[1]:.3g}"
    if max(good) < rate:
        verdict = Verdict.DISAGGREGATED if gain >= WORTH else Verdict.MIXED
        text = f"{rate:.3g} requests/s are more than this hardware carries either way: {max(good) / rate:.0%} of it"
        return verdict, [text, carries]
    if gain < WORTH:
        than = "less than" if gain < 1 else f"only {gain - 1:.0%} more than"
        return Verdict.MIXED, [f"don't split: on equal hardware it carries {than} mixed", carries]
    if good[0] >= ROOM * rate:
        text = f"don't split yet: mixed carries {good[0] / rate:.2g} times what is asked; nothing is gained below that"
        return Verdict.MIXED, [text, f"{carries}: it pays from {good[0]:.3g} requests/s on"]
    times = "mixed carries nothing" if good[0] == 0 else f"it carries {gain:.2f} times as much as mixed"
    text = "mixed misses" if good[0] < rate else f"mixed has less than {ROOM - 1:.0%} of room left"
    return Verdict.DISAGGREGATED, [f"split: on equal hardware {times}, and at what is asked {text}", carries]


def _why(mixed: Trial | None, split: Trial | None, at_mixed: Point | None, at_split: Point | None) -> list[str]:
    """What gives out first, and what is felt at the asked rate."""
    reasons = []
    for name, trial in (("mixed", mixed), ("the split", split)):
        failed = [point for point in trial.points if point.rate_per_s > trial.goodput_per_s] if trial else []
        if failed:
            first = min(failed, key=lambda point: point.rate_per_s)
            reasons.append(f"what gives out first in {name}: {_SPOKEN[first.limiting]}")
    if at_mixed is not None and at_split is not None:
        reasons.append(
            f"at what is asked, TPOT is {1e3 * at_mixed.tpot_s:.3g} ms mixed and {1e3 * at_split.tpot_s:.3g} ms split, "
            f"TTFT {at_mixed.ttft_s:.3g} s and {at_split.ttft_s:.3g} s"
        )
    return reasons


_SPOKEN = {
    "admission": "admission: requests are turned away",
    "prefill_queue": "TTFT, by waiting for prefill",
    "prefill": "TTFT, by prefill itself",
    "handoff": "the first gap: hand-off and the decode queue",
    "decode": "TPOT, by decode steps",
}


def _best(searched: Searched, *, is_mixed: bool) -> Trial | None:
    return next((trial for trial in searched.trials if trial.candidate.is_mixed is is_mixed), None)


def _goodput(trial: Trial | None) -> float:
    return trial.goodput_per_s if trial is not None else 0.0


def _at(search: Search, trial: Trial | None, rate_per_s: float) -> Point | None:
    if trial is None:
        return None
    return search.bench.run(trial.candidate, rate_per_s, trial.num_requests)


def _by_length(search: Search, mixed: Trial | None, split: Trial | None) -> tuple[LengthPoint, ...]:
    """By closed forms, each kind corrected by what its simulation said of the closed form here."""
    kinds = [_corrections(search.estimator, mixed), _corrections(search.estimator, split)]
    points = []
    for factor in FACTORS:
        estimator = Estimator(search.steps, search.traffic, search.target, factor)
        best = [0.0, 0.0]
        for candidate in search.candidates():
            kind = 0 if candidate.is_mixed else 1
            best[kind] = max(best[kind], estimator.of(candidate).goodput_per_s * kinds[kind])
        gain = best[1] / best[0] if best[0] else (float("inf") if best[1] else float("nan"))
        points.append(LengthPoint(factor * search.traffic.mean_prompt, gain))
    return tuple(points)


def _corrections(estimator: Estimator, trial: Trial | None) -> float:
    if trial is None:
        return 1.0
    return trial.goodput_per_s / estimator.of(trial.candidate).goodput_per_s


def _turn(points: tuple[LengthPoint, ...]) -> float:
    """Where the gain first reaches WORTH, between two lengths by a straight line; nan where it never does."""
    previous: LengthPoint | None = None
    for point in points:
        if point.gain >= WORTH:
            if previous is None or not previous.gain < WORTH or point.gain == float("inf"):
                return point.mean_prompt
            share = (WORTH - previous.gain) / (point.gain - previous.gain)
            return previous.mean_prompt + share * (point.mean_prompt - previous.mean_prompt)
        previous = point
    return float("nan")
