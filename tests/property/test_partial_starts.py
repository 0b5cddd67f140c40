"""First steps that begin over slow links, in seeded schedules of a whole cluster in virtual time."""

import os
import random
from collections import Counter
from functools import partial

from tests.property.test_virtual_cluster import (
    check_answer,
    check_disturbed,
    draw_request,
)

from disagg.core.roles import HandoffMode, PartialStart, Role
from disagg.core.spans import KvLayout
from disagg.policy.partial_start import PartialOutcome
from disagg.telemetry.metrics import PARTIAL_STARTS
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_time import Chances, Timing

TIMES = max(1, int(os.environ.get("DISAGG_SCHEDULES", "60")) // 60)
NUM_UNDISTURBED = 12 * TIMES
NUM_DISTURBED = 18 * TIMES
BYTE_S = (1e-6, 1e-5, 1e-4, 5e-4)  # of the link: from far less than a step for a layer to many steps


def slow_cluster(seed: int, rng: random.Random, chances: Chances) -> VirtualCluster:
    """Of 3 or 6 layers, of one rank or two, blocks alike or not."""
    cluster = VirtualCluster(seed, timing=Timing(byte_s=rng.choice(BYTE_S)), chances=chances)
    num_layers, num_heads = rng.choice([3, 6]), rng.choice([1, 2])
    mode, num_blocks = rng.choice(list(HandoffMode)), rng.choice([30, 64])

    def layout(block_size: int) -> KvLayout:
        shards = rng.choice([1, num_heads])
        return KvLayout(num_layers, num_heads, 2, "float32", block_size, head_shards=shards)

    for index in range(rng.randint(1, 2)):
        prefill, decode = layout(rng.choice([4, 8])), layout(4)
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, mode=mode, num_blocks=num_blocks, layout=prefill)
        cluster.start_worker(f"decode-{index}", Role.DECODE, num_blocks=num_blocks, layout=decode)
    cluster.time.run(until=lambda: cluster.is_ready)
    return cluster


def outcomes(cluster: VirtualCluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for worker in cluster.workers.values():
        for name, label, total in worker.scheduler.counters.items():
            if name == PARTIAL_STARTS.name:
                found[label] += int(total)
    return found


def test_undisturbed_every_answer_is_the_expected_one() -> None:
    """Each token of the test engine says what every byte of KV was when its layer ran."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_UNDISTURBED):
        rng = random.Random(seed)
        cluster = slow_cluster(seed, rng, Chances())
        for _ in range(15):
            cluster.time.after(rng.uniform(0, 2), partial(cluster.submit, draw_request(rng)))
        cluster.time.run(until=lambda cluster=cluster: len(cluster.answers) == 15 and cluster.are_all_over)  # type: ignore[misc]
        for request_id, answer in cluster.answers.items():
            assert answer.error is None, f"seed {seed}: {answer.error}"
            check_answer(cluster, request_id, answer)
        cluster.check_nothing_left()
        seen += outcomes(cluster)
    assert min(seen[each.value] for each in (PartialOutcome.FINISHED, PartialOutcome.JOINED)) >= NUM_UNDISTURBED // 4, (
        seen
    )
    assert seen[PartialOutcome.WIRE_SHORT.value] > 0


def test_any_fault_in_the_middle_leaves_every_answer_whole() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_DISTURBED):
        rng = random.Random(50_000 + seed)
        chances = Chances(corrupt=rng.choice([0.0, 0.05]), step_failure=rng.choice([0.0, 0.0, 0.01]))
        cluster = slow_cluster(seed, rng, chances)
        check_disturbed(cluster, rng, f"seed {seed}")
        seen += outcomes(cluster)
    assert seen[PartialOutcome.FINISHED.value] >= NUM_DISTURBED // 4, seen
    assert seen[PartialOutcome.DROPPED.value] > 0, seen


def test_switched_off_nothing_begins_and_answers_are_the_same() -> None:
    rng = random.Random(7)
    cluster = VirtualCluster(7, timing=Timing(byte_s=1e-4))
    cluster.start_worker("prefill-0", Role.PREFILL)
    cluster.start_worker("decode-0", Role.DECODE, partial_start=PartialStart.OFF)
    cluster.time.run(until=lambda: cluster.is_ready)
    for _ in range(10):
        cluster.time.after(rng.uniform(0, 2), partial(cluster.submit, draw_request(rng)))
    cluster.time.run(until=lambda: len(cluster.answers) == 10 and cluster.are_all_over)
    for request_id, answer in cluster.answers.items():
        check_answer(cluster, request_id, answer)
    assert set(outcomes(cluster)) == {PartialOutcome.OFF.value}
    cluster.check_nothing_left()
