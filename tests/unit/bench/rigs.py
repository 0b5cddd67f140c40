"""Records and results made by hand."""

import random

from disagg.bench.figures import figures
from disagg.bench.measure import LoadResult
from disagg.bench.observation import Moved, Observation, Sample
from disagg.bench.record import Lapse, RequestRecord
from disagg.bench.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def record(
    number: int,
    ttft_s: float = 0.5,
    gap_s: float = 0.05,
    num_tokens: int = 5,
    *,
    due_s: float | None = None,
    prompt: int = 100,
    lapse: Lapse | None = None,
) -> RequestRecord:
    due_s = 1.0 * number if due_s is None else due_s
    token_s = tuple(due_s + ttft_s + gap_s * position for position in range(num_tokens)) if lapse is None else ()
    return RequestRecord(
        number=number,
        due_s=due_s,
        sent_s=due_s + 0.001,
        end_s=token_s[-1] if token_s else due_s + 0.1,
        token_s=token_s,
        num_prompt_tokens=prompt,
        num_output_tokens=len(token_s),
        lapse=lapse,
        detail="" if lapse is None else "as told",
    )


def result(label: str, records: list[RequestRecord], busy: dict[str, float] | None = None) -> LoadResult:
    """busy: role -> share of ten seconds spent in steps."""
    samples = [
        Sample(at_s, f"{role}-0", role, share * at_s, 0.0, 1.0)
        for at_s in (0.0, 5.0, 10.0)
        for role, share in (busy or {}).items()
    ]
    observation = Observation(tuple(samples), Moved({"hidden": 90.0, "visible": 10.0}))
    return LoadResult(
        label=label,
        rate_per_s=1.0,
        records=tuple(records),
        figures=figures(records, SLO, seed=1),
        observation=observation,
    )


def noisy(ttft_s: float, gap_s: float, num: int = 60, seed: int = 1) -> list[RequestRecord]:
    """Prompts of all lengths, times within a tenth of what is asked."""
    rng = random.Random(seed)
    return [
        record(n, ttft_s * rng.uniform(0.9, 1.1), gap_s * rng.uniform(0.9, 1.1), prompt=rng.randrange(10, 1000))
        for n in range(num)
    ]
