"""Why a fleet misses its targets at the asked rate: what one prompt takes, what all take, how much wider is kept."""

import math
import statistics

from disagg.planner.floors import WHOLE, prompt_floor
from disagg.planner.measure import Point
from disagg.planner.search import Search


def shortfall(search: Search, at_mixed: Point | None, at_split: Point | None) -> list[str]:
    """Sentences. The points are at the asked rate."""
    points = [("mixed", at_mixed), ("the split", at_split)]
    known = [(name, point) for name, point in points if point is not None]
    wider = [_wider(search, name, point) for name, point in known if math.isfinite(point.slo_scale)]
    return [_one_prompt(search), _all_prompts(search, known), *wider]


def _one_prompt(search: Search) -> str:
    floor, target = prompt_floor(search.steps, search.traffic, search.target), search.target
    return (
        f"the floor of TTFT: {target.share:.0%} of prompts have up to {floor.num_tokens} tokens to compute with an "
        f"endless cache, {floor.alone_s:.3g} s alone on the fastest worker ({floor.cut}); the target is "
        f"{target.slo.ttft_s / floor.alone_s:.2g} times that"
    )


def _all_prompts(search: Search, known: list[tuple[str, Point]]) -> str:
    """Devices that reading keeps busy at the asked rate, on the cut that needs fewest."""
    traffic = search.traffic

    def busy(cached_share: float) -> float:
        """cached_share: of what an endless cache would hold, how much is held."""
        held = [(prompt, round(cached_share * (prompt - new))) for prompt, new, _ in traffic.samples]
        return traffic.rate_per_s * min(
            cut.num_gpus
            * statistics.fmean(search.estimator.prompt_s(cut, prompt - had, had, WHOLE) for prompt, had in held)
            for cut in search.steps.cuts()
        )

    seen = ", ".join(f"{point.cached_share:.0%} in {name}" for name, point in known)
    return (
        f"reading alone keeps {busy(1.0):.3g} of {search.fleet.num_gpus} GPUs busy at what is asked with an endless "
        f"cache ({1 - traffic.mean_uncached / traffic.mean_prompt:.0%} of prompt tokens), {busy(0.0):.3g} with none"
        + (f"; the caches of the runs held {seen}" if seen else "")
    )


def _wider(search: Search, name: str, point: Point) -> str:
    slo, scale = search.target.slo, point.slo_scale
    return (
        f"{name} keeps, at what is asked, targets {scale:.2g} times as wide (TTFT {scale * slo.ttft_s:.3g} s, "
        f"TPOT {1e3 * scale * slo.tpot_s:.3g} ms) in a run of {point.num_requests} requests"
    )
