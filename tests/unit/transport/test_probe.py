"""What is made of the times that exchanges take."""

import pytest

from disagg.transport import probe
from disagg.transport.probe import measure


class Link:
    """Exchanges over a link of one's own making, in time that stands still otherwise."""

    def __init__(self, bytes_per_s: float, latencies: list[float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._latencies = latencies  # of exchanges, in order; the last of all later ones
        self.sizes: list[int] = []
        self.now_s = 0.0

    def exchange(self, num_bytes: int) -> None:
        latency_s = self._latencies.pop(0) if len(self._latencies) > 1 else self._latencies[0]
        self.sizes.append(num_bytes)
        self.now_s += latency_s + num_bytes / self._bytes_per_s


def measured(monkeypatch: pytest.MonkeyPatch, link: Link, budget_s: float = 0.05) -> probe.Measured:
    monkeypatch.setattr("disagg.transport.probe.time.perf_counter", lambda: link.now_s)
    return measure(link.exchange, 4 << 20, budget_s)


def test_a_quick_link_is_filled_with_writes_that_grow_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(2e9, [1e-4])
    found = measured(monkeypatch, link)
    assert found.bytes_per_s == pytest.approx(2e9)
    assert found.latency_s == pytest.approx(1e-4)
    assert max(link.sizes) == 2 << 20  # 128 KiB, quadrupled as long as it stays within 4 MiB
    assert link.now_s < 0.06


def test_a_long_way_takes_some_round_trips_and_is_not_taken_for_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(125e6, [0.02])
    found = measured(monkeypatch, link)
    assert found.bytes_per_s == pytest.approx(125e6, rel=0.01)
    assert link.now_s > 10 * 0.02


def test_a_latency_that_was_badly_measured_makes_no_link_endlessly_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was busy during the pings."""
    link = Link(1e9, [0.016] * probe.NUM_PINGS + [1e-4])
    found = measured(monkeypatch, link)
    assert found.bytes_per_s <= 1e9 / probe.LEAST_SHARE
    assert found.latency_s < 0.016


def test_one_exchange_during_which_a_process_had_to_wait_makes_no_link_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(2e9, [1e-4] * probe.NUM_PINGS + [0.06, 1e-4])
    found = measured(monkeypatch, link, budget_s=0.0125)
    assert found.bytes_per_s == pytest.approx(2e9)
    assert len(link.sizes) == probe.NUM_PINGS + probe.MIN_EXCHANGES


def test_a_link_that_is_slow_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(125e3, [1e-3])  # 1 Mbit/s: the first exchange takes longer than all that may be spent
    found = measured(monkeypatch, link, budget_s=0.0125)
    assert found.bytes_per_s == pytest.approx(125e3, rel=0.01)
    assert len(link.sizes) == probe.NUM_PINGS + 1


class Bucket(Link):
    """Lets the bytes through at once for which it has saved up while nothing went over it."""

    def __init__(self, bytes_per_s: float, saved: int, waits: dict[int, float]) -> None:
        super().__init__(bytes_per_s, [1e-4])
        self._most = self._saved = float(saved)
        self._free_from_s = 0.0  # nothing goes over it since
        self._waits = waits  # seconds by which an answer is late, by exchange

    def exchange(self, num_bytes: int) -> None:
        answer_s = 1e-4 + self._waits.get(len(self.sizes), 0.0)
        self.sizes.append(num_bytes)
        saved = min(self._most, self._saved + (self.now_s - self._free_from_s) * self._bytes_per_s)
        self._saved = max(0.0, saved - num_bytes)
        self.now_s += max(0.0, num_bytes - saved) / self._bytes_per_s
        self._free_from_s = self.now_s
        self.now_s += answer_s


@pytest.mark.parametrize("waited", [(), (0,), (2,), (1, 3), (4,)], ids=str)
def test_what_an_idle_link_lets_through_at_once_is_not_its_rate(
    waited: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Bucket(12.5e6, 64_000, {probe.NUM_PINGS + number: 0.02 for number in waited})
    found = measured(monkeypatch, link, budget_s=0.0125)
    assert 0.5 < found.bytes_per_s / 12.5e6 < 1.05
