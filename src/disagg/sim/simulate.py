"""simulate(scenario, seed) -> Outcome. Deterministic: the seed decides what is asked and when; nothing else does."""

import contextlib
import gc
import hashlib
import random
from collections.abc import Iterator

import msgspec

from disagg.sim.cluster import SimCluster
from disagg.sim.outcome import Outcome, outcome_of
from disagg.sim.scenario import Scenario
from disagg.telemetry.decision_log import Decision


class DecisionDigest:
    """A fingerprint of decisions in their order."""

    def __init__(self) -> None:
        self.num = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, decision: Decision) -> None:
        self.num += 1
        self._hash.update(msgspec.json.encode(decision))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """What a run drops is not cyclic; looking for cycles among what it keeps would cost more the more it keeps."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(scenario: Scenario, seed: int = 0) -> Outcome:
    """Run to the end of the work.

    Raises ConfigurationError for work or workers that cannot be, InternalFault when a rule breaks or the scenario's
    limit_s passes.
    """
    decided = DecisionDigest()
    cluster = SimCluster(scenario, scenario.work.start(random.Random(seed)), decided.add)
    with _rare_collections():
        cluster.run()
    return outcome_of(cluster, seed, decided.num, decided.hexdigest())
