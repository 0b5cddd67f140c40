"""Links: shares, bandwidth that is given back, bytes that are lost."""

import pytest

from disagg.core.errors import ConfigurationError
from disagg.sim.events import EventHeap
from disagg.sim.links import ComputedLinks, FairLinks, Links, Write, fair_rates
from disagg.sim.scenario import Link

MB = 1_000_000


class Rig:
    """A heap, links of 1 MB/s, and when each write was done."""

    def __init__(self, kind: type[FairLinks] | type[ComputedLinks]) -> None:
        self.heap = EventHeap()
        self.links: Links = kind(self.heap)
        for resource in ("a out", "b out", "c in", "d in"):
            self.links.set_capacity(resource, MB)
        self.done: dict[str, tuple[float, bool]] = {}

    def send(self, name: str, source: str, target: str, num_bytes: int, **more: float) -> None:
        resources = (f"{source} out", f"{target} in")
        fields = {"latency_s": 0.0, "first_s": self.heap.now_s, "last_bytes": 0} | more
        write = Write(name.encode(), (source, target), resources, num_bytes, **fields)  # type: ignore[arg-type]
        self.links.send(write, lambda ok: self.done.__setitem__(name, (round(self.heap.now_s, 6), ok)))
        self.links.check_invariants()

    def run(self) -> dict[str, tuple[float, bool]]:
        while self.heap.step():
            self.links.check_invariants()
        return self.done


@pytest.fixture(params=[FairLinks, ComputedLinks])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_one_transfer_has_the_link_to_itself(rig: Rig) -> None:
    rig.send("one", "a", "c", 2 * MB, latency_s=0.5)
    assert rig.run() == {"one": (2.5, True)}


def test_the_last_of_several_ends_when_all_bytes_could(rig: Rig) -> None:
    for name in ("one", "two", "three"):
        rig.send(name, "a", "c", MB)
    assert max(done for done, _ in rig.run().values()) == pytest.approx(3.0)


def test_transfers_between_other_workers_are_not_slowed(rig: Rig) -> None:
    rig.send("one", "a", "c", MB)
    rig.send("other", "b", "d", MB)
    assert rig.run() == {"one": (1.0, True), "other": (1.0, True)}


def test_a_busy_receiver_is_shared_by_its_senders(rig: Rig) -> None:
    rig.send("one", "a", "c", MB)
    rig.send("other", "b", "c", MB)
    assert max(done for done, _ in rig.run().values()) == pytest.approx(2.0)


def test_a_fair_share_grows_when_another_has_ended() -> None:
    rig = Rig(FairLinks)
    rig.send("short", "a", "c", MB // 2)
    rig.send("long", "a", "d", MB)
    assert rig.run() == {"short": (1.0, True), "long": (1.5, True)}


def test_cancelled_bandwidth_is_given_back() -> None:
    rig = Rig(FairLinks)
    rig.send("gone", "a", "c", 10 * MB)
    rig.send("stays", "a", "d", MB)
    rig.heap.at(1.0, rig.links.cancel, b"gone")
    assert rig.run() == {"gone": (1.0, False), "stays": (1.5, True)}


def test_what_is_cancelled_never_arrives(rig: Rig) -> None:
    rig.send("one", "a", "c", MB)
    rig.send("other", "b", "c", MB)
    rig.heap.at(0.25, rig.links.break_pair, ("a", "c"))
    done = rig.run()
    assert done["one"] == (0.25, False)
    assert done["other"][1]
    rig.links.cancel(b"one")
    assert rig.done["one"] == (0.25, False)


def test_layers_that_came_one_by_one_are_mostly_there_when_the_last_is_computed() -> None:
    rig = Rig(ComputedLinks)
    rig.heap.at(10.0, lambda: rig.send("hidden", "a", "c", MB, first_s=8.0, last_bytes=MB // 10))
    rig.heap.at(10.0, lambda: rig.send("visible", "b", "d", 4 * MB, first_s=8.0, last_bytes=MB // 10))
    assert rig.run() == {"hidden": (10.1, True), "visible": (12.0, True)}


def test_max_min_shares_leave_nothing_unused() -> None:
    rates = fair_rates([("a", "slow"), ("a", "fast"), ("b", "fast")], {"a": 10.0, "b": 10.0, "slow": 2.0, "fast": 12.0})
    assert rates == [2.0, 6.0, 6.0]
    assert fair_rates([], {"a": 1.0}) == []


def test_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth must be above 0"):
        Link(bandwidth_bytes_s=0)
