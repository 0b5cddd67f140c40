"""Which hand-off is due next: the same answer as looking at all of them gives."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.rigs import LAYOUT, PEER, handoff, sequence_id

from disagg.core.ids import Fence, HandoffId, Incarnation
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Task
from disagg.kvcache.block_hash import BlockHash
from disagg.protocol.handoff import SourceState, SourceTrigger
from disagg.scheduler.leases import LEASED_SOURCE, Leases
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource

FENCE = Fence(Incarnation(1), Incarnation(2), 1)


def sending(number: int) -> HandoffSource:
    return HandoffSource(handoff(number), PEER, FENCE, LAYOUT)


class Site:
    """Sources that ask, are refused, are renewed, end. Every answer is compared with that of looking at all."""

    def __init__(self) -> None:
        self.sequences: dict[HandoffId, Sequence] = {}
        self.sources: dict[HandoffId, HandoffSource] = {}
        self.leases = Leases(self.sequences)
        self.now_s = 0.0

    def start(self) -> None:
        number = len(self.sources)
        spec = SequenceSpec(sequence_id(number), (1, 2), SamplingParams(3))
        sequence = Sequence(spec, Task.PREFILL, 1, number, arrived_s=self.now_s, root=BlockHash(b""))
        sequence.source = self.sources[sequence.attempt_id] = sending(number)
        self.sequences[sequence.attempt_id] = sequence

    def change(self, source: HandoffSource, rng: random.Random) -> None:
        """One of the things that may happen to a source as it is."""
        if source.state is SourceState.CLOSED:
            self.sequences.pop(source.handoff_id, None)
        elif source.state is SourceState.QUEUED:
            source.machine.fire(SourceTrigger.RESERVATION_REQUESTED)
            self.leases.lease(source, self.now_s + rng.uniform(0, 10))
        elif rng.random() < 0.3:
            source.machine.fire(SourceTrigger.RESERVATION_REFUSED)
            self.leases.retry(source, self.now_s + rng.uniform(0, 2))
        elif rng.random() < 0.7:
            self.leases.lease(source, self.now_s + rng.uniform(0, 10))
        else:
            source.machine.fire(SourceTrigger.CANCELLED)

    def check(self) -> None:
        sources = [self.sources[handoff_id] for handoff_id in self.sequences]
        leased = [source.lease_until_s for source in sources if source.state in LEASED_SOURCE]
        refused = [source.retry_at_s for source in sources if source.state is SourceState.QUEUED]
        assert self.leases.next_due_s() == min(leased, default=float("inf"))
        assert self.leases.next_retry_s(self.now_s) == min(
            (at_s for at_s in refused if at_s > self.now_s), default=float("inf")
        )
        self.leases.check_invariants(self.now_s)

    def end_due(self) -> None:
        """Each end whose lease is over is named once."""
        expected = {
            handoff_id
            for handoff_id in self.sequences
            if self.sources[handoff_id].state in LEASED_SOURCE and self.sources[handoff_id].lease_until_s <= self.now_s
        }
        due = self.leases.take_due(self.now_s)
        assert len(due) == len(expected)
        assert {*due} == expected
        for handoff_id in due:
            self.sources[handoff_id].machine.fire(SourceTrigger.CANCELLED)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_what_is_due_next_is_what_looking_at_all_would_say(seed: int) -> None:
    rng, site = random.Random(seed), Site()
    for _ in range(120):
        choice = rng.random()
        if choice < 0.2 or not site.sources:
            site.start()
        elif choice < 0.8:
            site.change(rng.choice([*site.sources.values()]), rng)
        else:
            site.now_s += rng.expovariate(1.0)
            site.end_due()
        site.check()


def test_what_has_ended_is_not_kept() -> None:
    rng, site = random.Random(3), Site()
    for _ in range(50):
        site.start()
    for source in site.sources.values():
        site.change(source, rng)
        source.machine.fire(SourceTrigger.CANCELLED)
        site.change(source, rng)
    site.check()
    assert (site.leases._due, site.leases._listed_s, site.leases._retries) == ([], {}, [])
