"""Results as values for programs, one JSON object for each command."""

import msgspec

from disagg.bench.comparison import Verdict
from disagg.bench.figures import Figures
from disagg.bench.measure import LoadResult
from disagg.bench.search import Limit
from disagg.bench.stages import StageShare, stage_shares
from disagg.telemetry.timeline import Part


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load. What follows the figures is the server's word, empty of one that says nothing.

    NaN and infinity are null in JSON.
    """

    label: str
    rate_per_s: float
    figures: Figures
    busy_by_role: dict[str, float]  # share of time in forward passes
    hidden_share: float  # of the bytes that were handed off
    ttft_stages: tuple[StageShare, ...]
    first_gap_stages: tuple[StageShare, ...]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of one load, or of a search."""

    asked: str
    loads: tuple[LoadReport, ...]
    limit: Limit | None


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """A load of each side for each rate."""

    scenario: str
    verdict: Verdict
    mixed: tuple[LoadReport, ...]
    separate: tuple[LoadReport, ...]


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """All scenarios."""

    asked: str
    scenarios: tuple[ScenarioReport, ...]


def load_report(result: LoadResult) -> LoadReport:
    return LoadReport(
        label=result.label,
        rate_per_s=result.rate_per_s,
        figures=result.figures,
        busy_by_role=result.observation.busy_by_role(),
        hidden_share=result.observation.moved.hidden_share,
        ttft_stages=stage_shares(result.observation.timelines, Part.TTFT),
        first_gap_stages=stage_shares(result.observation.timelines, Part.FIRST_GAP),
    )
