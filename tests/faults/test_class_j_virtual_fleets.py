"""Class J: workers of two releases side by side.

| case | what the class means here | where it is shown |
|---|---|---|
| J1 | a worker of protocol N and one of N+1 alone refuse each other when they meet, naming both ranges | virtual time |
| J2 | half a fleet upgraded: only compatible groups pair, and not one request fails | virtual time |
"""

import random

import pytest
from tests.faults.outputs import check_answers, counted

from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.stream import GenerateRequest
from disagg.telemetry import metrics as table
from disagg.testing.virtual import MODEL, VirtualCluster

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
OLD, BOTH, NEW = (1, 1), (1, 2), (2, 2)


def ask(cluster: VirtualCluster, rng: random.Random, count: int) -> None:
    for _ in range(count):
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(1, 40)))
        cluster.submit(GenerateRequest(MODEL, prompt, GREEDY))


def test_j1_two_releases_that_share_no_protocol_refuse_each_other_and_name_both_ranges() -> None:
    """The decode worker reads what it is sent itself, which is counted: no request waits for KV that cannot come."""
    cluster = VirtualCluster(1)
    prefill = cluster.start_worker("prefill-0", Role.PREFILL, protocols=OLD)
    decode = cluster.start_worker("decode-0", Role.DECODE, protocols=NEW)
    cluster.time.run_for(2.0)
    assert not cluster.is_ready
    known = cluster.dispatcher.registry.get(prefill.worker_id)
    assert known is not None
    (failure,) = known.refusals.values()
    assert "protocol range 1..1 is not 2..2" in failure.message
    assert not prefill.peers
    assert not decode.peers
    cluster.start_worker("prefill-1", Role.PREFILL, protocols=BOTH)
    cluster.time.run(until=lambda: cluster.is_ready)
    ask(cluster, random.Random(1), 10)
    cluster.time.run(until=lambda: cluster.are_all_over)
    assert all(answer.error is None for answer in cluster.answers.values())
    check_answers(cluster)
    assert counted(prefill, table.HANDOFFS) == 0


@pytest.mark.parametrize("seed", range(6))
def test_j2_half_a_fleet_upgraded_pairs_inside_its_groups_and_no_request_fails(seed: int) -> None:
    """Worker by worker, the old one is drained when the new one is there; requests come all the time."""
    rng = random.Random(seed)
    cluster = VirtualCluster(seed)
    roles = {f"{role.value}-{index}": role for index in (0, 1) for role in (Role.PREFILL, Role.DECODE)}
    for name, role in roles.items():
        cluster.start_worker(name, role, protocols=OLD)
    cluster.time.run(until=lambda: cluster.is_ready)
    for name, role in roles.items():
        ask(cluster, rng, 8)
        cluster.start_worker(f"{name}-new", role, protocols=NEW)
        cluster.time.run_for(rng.uniform(0.05, 0.5))
        check_groups(cluster)
        cluster.drain(name)
        ask(cluster, rng, 8)
        cluster.time.run_for(rng.uniform(0.05, 0.5))
    cluster.time.run(until=lambda: cluster.are_all_over)
    assert [str(answer.error) for answer in cluster.answers.values() if answer.error is not None] == []
    check_answers(cluster)
    check_groups(cluster)
    upgraded = [cluster.workers[name] for name in cluster.workers if name.endswith("-new")]
    assert sum(counted(each, table.HANDOFFS, "received") for each in upgraded) > 0


def check_groups(cluster: VirtualCluster) -> None:
    for each in cluster.workers.values():
        for peer in each.peers.values():
            assert each.card.protocol_max == peer.card.protocol_max, (each.worker_id, peer.worker_id)
