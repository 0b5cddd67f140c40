"""What the histograms are told of one request's tokens."""

from prometheus_client.parser import text_string_to_metric_families
from tests.unit.dispatch.rigs import Desk

from disagg.policy.routing import Path
from disagg.router.metrics import RouterMetrics
from disagg.router.stream_times import StreamTimes
from disagg.telemetry.metrics import E2E_SECONDS, ITL_SECONDS, TPOT_SECONDS, TTFT_SECONDS, Metric


class Clocked:
    """One request that began at 100 s."""

    def __init__(self, num_choices: int = 1) -> None:
        self.metrics = RouterMetrics(Desk().dispatcher)
        self.times = StreamTimes(self.metrics, Path.REMOTE, num_choices, 100.0)

    def told(self, metric: Metric) -> tuple[float, float]:
        """(how often, sum in seconds)."""
        self.times.check_invariants()
        families = text_string_to_metric_families(self.metrics.text().decode())
        samples = [s for family in families for s in family.samples if s.labels.get("path") == "remote"]
        by_name = {sample.name: sample.value for sample in samples}
        return by_name.get(metric.name + "_count", 0.0), round(by_name.get(metric.name + "_sum", 0.0), 6)


def test_first_token_gaps_and_the_mean_gap_of_a_whole_answer() -> None:
    clocked = Clocked()
    clocked.times.note_tokens(0, 1, 100.5)
    clocked.times.note_tokens(0, 1, 100.6)
    assert clocked.told(TPOT_SECONDS) == (0, 0)
    clocked.times.note_tokens(0, 3, 101.3)  # a moved answer's tokens come together
    clocked.times.note_end(0)
    assert clocked.told(TTFT_SECONDS) == (1, 0.5)
    assert clocked.told(ITL_SECONDS) == (2, 0.8)
    assert clocked.told(TPOT_SECONDS) == (1, 0.2)
    assert clocked.told(E2E_SECONDS) == (1, 1.3)


def test_a_request_ends_with_the_last_of_its_answers() -> None:
    clocked = Clocked(num_choices=2)
    clocked.times.note_tokens(0, 1, 101.0)
    clocked.times.note_end(0)
    assert clocked.told(E2E_SECONDS) == (0, 0)
    clocked.times.note_tokens(1, 1, 103.0)
    clocked.times.note_end(1)
    clocked.times.note_end(1)
    assert clocked.told(E2E_SECONDS) == (1, 3.0)
    assert clocked.told(TPOT_SECONDS) == (0, 0)  # one token has no gap
    assert clocked.told(TTFT_SECONDS) == (2, 4.0)
