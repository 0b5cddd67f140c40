"""Records into figures: what a report says of one load."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from disagg.bench import estimate
from disagg.bench.estimate import Estimate
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo

SHARES = (0.5, 0.9, 0.99)


class Spread(msgspec.Struct, frozen=True):
    """Of one measure over all whole requests, seconds."""

    num: int
    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate
    most: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of a load without its warm-up. Rates are over duration_s, from the first due to the last end."""

    num_requests: int
    num_whole: int
    lapses: dict[str, int]
    duration_s: float
    ttft: Spread
    first_gap: Spread
    tpot: Spread
    itl: Spread
    latency: Spread
    requests_per_s: float  # whole ones
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    slo: Slo
    attainment: Estimate
    goodput_per_s: float
    num_late_first: int  # missed the TTFT target; failed ones count in neither
    num_late_tokens: int  # missed the TPOT target
    num_unseen_tokens: int
    send_lag: Spread  # due to sent: this client's own delay, part of every latency


def figures(records: Sequence[RequestRecord], slo: Slo, seed: int = 0) -> Figures:
    """Equal records and seed give equal figures."""
    counted = [record for record in records if not record.is_warm_up]
    whole = [record for record in counted if record.is_whole]
    start_s = min((record.due_s for record in counted), default=0.0)
    duration_s = max((record.end_s for record in counted), default=0.0) - start_s
    num_good = sum(record.attains(slo) for record in counted)

    def per_s(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Figures(
        num_requests=len(counted),
        num_whole=len(whole),
        lapses=dict(Counter(record.lapse.value for record in counted if record.lapse is not None)),
        duration_s=duration_s,
        ttft=_spread([(record.ttft_s,) for record in whole], seed),
        first_gap=_spread([(r.first_gap_s,) for r in whole if r.first_gap_s is not None], seed),
        tpot=_spread([(r.tpot_s,) for r in whole if r.tpot_s is not None], seed),
        itl=_spread([record.gaps_s for record in whole], seed),
        latency=_spread([(record.latency_s,) for record in whole], seed),
        requests_per_s=per_s(len(whole)),
        prompt_tokens_per_s=per_s(sum(record.num_prompt_tokens for record in whole)),
        output_tokens_per_s=per_s(sum(record.num_output_tokens for record in whole)),
        slo=slo,
        attainment=estimate.share(num_good, len(counted)),
        goodput_per_s=per_s(num_good),
        num_late_first=sum(not record.meets_ttft(slo) for record in whole),
        num_late_tokens=sum(not record.meets_tpot(slo) for record in whole),
        num_unseen_tokens=sum(record.num_unseen_tokens for record in whole),
        send_lag=_spread([(r.sent_s - r.due_s,) for r in counted if r.sent_s > 0], seed),
    )


def _spread(groups: Sequence[Sequence[float]], seed: int) -> Spread:
    values = [value for group in groups for value in group]
    p50, p90, p99 = estimate.percentiles(groups, SHARES, seed)
    # Neighbouring gaps are not independent: the mean's interval comes from the means of requests.
    of_groups = estimate.mean([sum(group) / len(group) for group in groups if group])
    middle = sum(values) / len(values) if values else of_groups.value
    shift = middle - of_groups.value
    mean = Estimate(middle, of_groups.low + shift, of_groups.high + shift)
    return Spread(len(values), mean, p50, p90, p99, max(values, default=float("nan")))
