"""First tokens told by whoever writes the answer, in seeded schedules of a whole cluster in virtual time."""

import os
import random
from functools import partial

import pytest
from tests.property.test_timelines import WatchedCluster
from tests.property.test_virtual_cluster import (
    check_answer,
    check_disturbed,
)

from disagg.core.roles import FirstToken, Role
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part, lay_out
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_time import Chances

NUM_DISTURBED = 12 * max(1, int(os.environ.get("DISAGG_SCHEDULES", "60")) // 60)


def start(cluster: VirtualCluster, rng: random.Random, kinds: list[FirstToken]) -> None:
    for index in range(2):
        for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE)):
            num_blocks = rng.choice([30, 64])
            cluster.start_worker(f"{name}-{index}", role, num_blocks=num_blocks, first_token=rng.choice(kinds))
    cluster.time.run(until=lambda: cluster.is_ready)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_gap_is_one_step_and_the_timeline_adds_up(seed: int) -> None:
    rng = random.Random(seed)
    cluster = WatchedCluster(seed, Chances(), 0)
    start(cluster, rng, [FirstToken.STEADY])
    for _ in range(25):
        cluster.time.after(rng.uniform(0, 2), partial(cluster.ask, rng, may_abort=False))
    cluster.time.run(until=lambda: len(cluster.answers) == 25 and cluster.are_all_over)
    num_handed_over = 0
    for request_id, seen in cluster.seen.items():
        check_answer(cluster, request_id, cluster.answers[request_id])
        for choice, token_s in zip(lay_out(seen.track).choices, seen.token_s, strict=True):
            choice.check_invariants()
            assert choice.ttft_s == pytest.approx(token_s[0] - seen.submitted_s, abs=1e-9)
            if choice.prefill_worker and len(token_s) > 1:
                assert choice.seconds(Part.FIRST_GAP, Stage.DECODE_QUEUE) == 0
                num_handed_over += 1
    assert num_handed_over > 10
    cluster.check_nothing_left()


def test_any_fault_in_the_middle_leaves_every_answer_whole() -> None:
    for seed in range(NUM_DISTURBED):
        rng = random.Random(90_000 + seed)
        chances = Chances(corrupt=rng.choice([0.0, 0.05]), step_failure=rng.choice([0.0, 0.0, 0.01]))
        cluster = VirtualCluster(seed, chances=chances)
        start(cluster, rng, list(FirstToken))
        check_disturbed(cluster, rng, f"seed {seed}")
