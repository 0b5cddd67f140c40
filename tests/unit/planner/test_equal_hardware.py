"""Mixed on the very devices of the split, unlike ones side by side, and what is left without one worker."""

import pytest
from tests.unit.planner import rigs

from disagg.core.roles import Role
from disagg.planner.candidate import Candidate, PoolPlan, worker_specs
from disagg.planner.estimate import Estimator, Target
from disagg.planner.fleet import Cut, Fleet, make_gpus
from disagg.planner.plan import Plan, plan
from disagg.planner.search import Objective, Search, Watch
from disagg.sim.hardware import catalogue
from disagg.sim.scenario import Slo

H100, A100 = Cut("H100-SXM", 1), Cut("A100-SXM-80G", 1)
UNLIKE = Fleet(model=catalogue.model_shape("Llama-3.1-8B"), gpus=(make_gpus("h100", 2), make_gpus("a100", 2)))


def both_kinds(num_each: int = 1) -> Candidate:
    return Candidate(tuple(PoolPlan(Role.MIXED, num_each, cut, 8192, 512) for cut in (H100, A100)))


@pytest.fixture(scope="module")
def per_gpu() -> Plan:
    return plan(rigs.search(2, objective=Objective.PER_GPU))


def test_where_devices_are_saved_mixed_on_those_of_the_split_is_in_the_table(per_gpu: Plan) -> None:
    assert per_gpu.split is not None
    assert per_gpu.equal is not None
    assert per_gpu.equal in per_gpu.rows
    assert per_gpu.equal.candidate.is_mixed
    assert per_gpu.equal.candidate.usage == per_gpu.split.candidate.usage
    assert per_gpu.equal.trial.num_requests >= per_gpu.split.trial.num_requests / 2
    assert not per_gpu.equal.is_short_look
    others = [row for row in per_gpu.rows if row.candidate.is_mixed and not row.is_short_look]
    same = [row for row in others if row.candidate.usage == per_gpu.equal.candidate.usage]
    assert per_gpu.equal.trial.goodput_per_s == max(row.trial.goodput_per_s for row in same)


def test_where_the_sum_counts_both_have_the_whole_fleet() -> None:
    found = rigs.search(2).run(Watch(is_over=lambda: True))
    assert found.equal_mixed is None
    assert {trial.candidate.num_gpus for trial in found.trials if trial.candidate.is_mixed} == {2}


def test_unlike_devices_are_mixed_side_by_side_before_a_split_of_them_is_called_better() -> None:
    search = Search(UNLIKE, rigs.traffic(), Target(Slo(1.0, 0.03)), effort=rigs.QUICK)
    found = search.run(Watch(is_over=lambda: True))
    mixed = [trial.candidate for trial in found.trials if trial.candidate.is_mixed]
    assert {"H100-SXM": 2, "A100-SXM-80G": 2} in [each.usage for each in mixed]


def test_what_pools_side_by_side_carry_adds_up() -> None:
    search = Search(UNLIKE, rigs.traffic(), Target(Slo(1.0, 0.03)))
    estimator = Estimator(search.steps, search.traffic, search.target)
    alone = [estimator.of(Candidate((pool,))).goodput_per_s for pool in both_kinds().pools]
    assert all(alone)
    assert estimator.of(both_kinds()).goodput_per_s == pytest.approx(sum(alone))
    equal = search.mixed_on(both_kinds(2))
    assert equal is not None
    assert equal.usage == both_kinds(2).usage


def test_unlike_mixed_workers_have_names_of_their_own_and_serve() -> None:
    search = Search(UNLIKE, rigs.traffic(), Target(Slo(1.0, 0.03)))
    assert [spec.name for spec in worker_specs(both_kinds(2), search.steps, 4096)] == [f"mixed-{n}" for n in range(4)]
    assert search.bench.run(both_kinds(), 1.0, 60).attainment == 1.0


def test_one_less_is_of_one_pool_and_leaves_no_phase_without_a_worker() -> None:
    first, second = both_kinds(2).pools
    less = both_kinds(2).with_one_less(second)
    assert less is not None
    assert less.usage == {"H100-SXM": 2, "A100-SXM-80G": 1}
    alone = both_kinds().with_one_less(both_kinds().pools[0])
    assert alone is not None
    assert alone.usage == {"A100-SXM-80G": 1}
    assert alone.with_one_less(alone.pools[0]) is None
    pools = (PoolPlan(Role.PREFILL, 1, H100, 2048), PoolPlan(Role.DECODE, 2, H100, 8192))
    assert Candidate(pools).with_one_less(pools[0]) is None
    left = Candidate(pools).with_one_less(pools[1])
    assert left is not None
    assert left.num_gpus == 2
    assert first.count == 2


def test_without_the_only_prefill_worker_decode_reads_and_is_felt() -> None:
    search = rigs.search(2)
    pools = (PoolPlan(Role.PREFILL, 1, H100, 8192), PoolPlan(Role.DECODE, 1, H100, 8192, 512))
    whole, less = (search.bench.run(Candidate(pools), 5.0, 60, dead=dead) for dead in ("", "prefill-0"))
    assert whole.num_requests == less.num_requests
    assert less.tpot_s > 1.2 * whole.tpot_s
    assert less.attainment <= whole.attainment
