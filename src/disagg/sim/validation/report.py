"""Judges what we say against what was published."""

import enum
import math
from collections.abc import Sequence

import msgspec

from disagg.sim.validation.case import Case, Check, Scope


class Verdict(enum.StrEnum):
    PASS = "pass"
    MISS = "MISS"  # nobody has said why, or it is more than was said: the run fails
    KNOWN_MISS = "miss, known"
    SKIPPED = "skipped"


class Result(msgspec.Struct, frozen=True):
    """One check of one case."""

    case: Case
    check: Check
    verdict: Verdict
    ours: tuple[float, ...] = ()
    error: float = math.nan  # the one that was judged, signed where it is a single value's
    reason: str = ""


def judge(case: Case, check: Check, ours: Sequence[float]) -> Result:
    """Raises ValueError where the numbers of values differ."""
    if len(ours) != len(check.published):
        raise ValueError(f"{case.id} {check.metric}: {len(ours)} values for {len(check.published)} published ones")
    if check.scope is Scope.POINTS:
        errors = [mine - theirs for mine, theirs in zip(ours, check.published, strict=True)]
    else:
        errors = [mine / theirs - 1 for mine, theirs in zip(ours, check.published, strict=True)]
    if check.scope is Scope.MEAN:
        error = math.fsum(map(abs, errors)) / len(errors)
    else:
        error = max(errors, key=abs)
    if abs(error) <= check.tolerance:
        note = f"was listed as a miss: {check.known_miss}" if check.known_miss else ""
        return Result(case, check, Verdict.PASS, tuple(ours), error, note)
    if not check.known_miss:
        return Result(case, check, Verdict.MISS, tuple(ours), error)
    if abs(error) > check.missed_by:
        reason = f"worse than the {check.missed_by:g} that are known: {check.known_miss}"
        return Result(case, check, Verdict.MISS, tuple(ours), error, reason)
    return Result(case, check, Verdict.KNOWN_MISS, tuple(ours), error, check.known_miss)


def skip(case: Case, check: Check, reason: str) -> Result:
    return Result(case, check, Verdict.SKIPPED, reason=reason)


def lines(results: Sequence[Result]) -> list[str]:
    """As text: case, published, ours, error, tolerance, verdict."""
    out: list[str] = []
    shown = ""
    for result in results:
        case, check = result.case, result.check
        if case.id != shown:
            shown = case.id
            out += ["", f"{case.id}  ({case.use}) {case.title}", f"  source: {case.source}"]
        out.append(f"  {check.metric} [{check.unit}]")
        if check.at:
            out.append(f"      at         {_row(check.at)}")
        out.append(f"      published  {_row(check.published)}")
        if result.ours:
            out.append(f"      ours       {_row(result.ours)}")
        out.append(f"      {_judgement(result)}")
    counts = ", ".join(f"{sum(r.verdict is kind for r in results)} {kind}" for kind in Verdict)
    return [*out, "", f"{len(results)} checks of {len({r.case.id for r in results})} cases: {counts}"]


def _judgement(result: Result) -> str:
    check = result.check
    why = f": {result.reason}" if result.reason else ""
    if result.verdict is Verdict.SKIPPED:
        return f"{result.verdict}{why}"
    if check.scope is Scope.POINTS:
        return f"worst {result.error:+.1f} {check.unit} of {check.tolerance:g} -> {result.verdict}{why}"
    label = {Scope.EACH: "worst", Scope.MEAN: "mean |error|"}[check.scope]
    sign = "" if check.scope is Scope.MEAN else "+"
    return f"{label} {result.error:{sign}.1%} of {check.tolerance:.1%} -> {result.verdict}{why}"


def _row(values: Sequence[float]) -> str:
    return "  ".join(f"{_number(value):>8}" for value in values)


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
