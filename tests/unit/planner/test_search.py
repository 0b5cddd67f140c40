"""Closed forms and the search: same seeds same plans, more devices never less, nothing left out."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner import rigs

from disagg.core.errors import ConfigurationError
from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.planner.advise import Verdict, advise
from disagg.planner.candidate import Candidate, PoolPlan, network_card, wire_gain, worker_specs
from disagg.planner.estimate import Target
from disagg.planner.fleet import Cut, Fleet, Steps, make_gpus
from disagg.planner.floors import prompt_floor
from disagg.planner.measure import Bench, Point, goodput_of
from disagg.planner.plan import Plan, plan
from disagg.planner.search import Objective, Search, Watch, counts_up_to
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.precision import Precision
from disagg.sim.outcome import Stage
from disagg.sim.scenario import Slo

TRAFFIC = rigs.traffic()


def best_estimate(num_gpus: int, slo: Slo) -> float:
    found = Search(rigs.fleet(num_gpus), TRAFFIC, Target(slo)).ranked()
    return max((row.estimate_per_s for row in found), default=0.0)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 20), st.floats(0.5, 5), st.floats(0.012, 0.1))
def test_one_more_device_never_lowers_the_best_closed_form(num_gpus: int, ttft_s: float, tpot_s: float) -> None:
    slo = Slo(ttft_s, tpot_s)
    assert best_estimate(num_gpus + 1, slo) >= best_estimate(num_gpus, slo)


@settings(max_examples=6, deadline=None)
@given(st.floats(0.5, 5), st.floats(0.012, 0.1), st.floats(1.0, 3.0))
def test_wider_targets_never_lower_the_best_closed_form(ttft_s: float, tpot_s: float, factor: float) -> None:
    assert best_estimate(4, Slo(factor * ttft_s, factor * tpot_s)) >= best_estimate(4, Slo(ttft_s, tpot_s))


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(rigs.search(4))


def test_twice_the_devices_carry_more_when_simulated(found: Plan) -> None:
    assert found.best.trial.goodput_per_s >= plan(rigs.search(2)).best.trial.goodput_per_s > 0


def test_equal_seeds_give_equal_plans(found: Plan) -> None:
    assert msgspec.json.encode(found) == msgspec.json.encode(plan(rigs.search(4)))


def test_mixed_on_equal_hardware_is_always_in_the_table(found: Plan) -> None:
    assert any(row.candidate.is_mixed for row in found.rows)
    assert any(not row.candidate.is_mixed for row in found.rows)
    assert all(row.candidate.num_gpus <= 4 for row in found.rows)
    assert [probe.what for probe in found.loads] == ["80% of the load", "100% of the load", "120% of the load"]
    assert found.best.is_on_front


def test_every_candidate_fits_the_fleet_and_the_budget() -> None:
    gpus = (make_gpus("h100", 6, 4.0), make_gpus("a100", 4, 2.0))
    fleet = Fleet(model=catalogue.model_shape("Llama-3.1-8B"), gpus=gpus, budget_usd_per_hour=20.0)
    found = Search(fleet, TRAFFIC, Target(Slo(2.0, 0.05)), objective=Objective.PER_DOLLAR).ranked()
    assert found
    for row in found:
        used = {each.device: 0 for each in gpus}
        for pool in row.candidate.pools:
            used[pool.cut.device] += pool.num_gpus
        assert all(used[each.device] <= each.count for each in gpus)
        assert row.candidate.usd_per_hour(fleet) <= 20.0
    devices = {tuple(pool.cut.device for pool in row.candidate.pools) for row in found}
    assert ("H100-SXM", "A100-SXM-80G") in devices
    assert ("A100-SXM-80G", "H100-SXM") in devices


def test_the_candidates_of_a_large_fleet_are_not_as_many_as_its_devices_squared() -> None:
    assert [*counts_up_to(31)] == [*range(1, 32)]
    assert [*counts_up_to(70)][31:] == [*range(32, 64, 2), 64, 68]
    assert [*counts_up_to(0)] == []
    nums = [
        sum(1 for _ in Search(rigs.fleet(num), TRAFFIC, Target(Slo()), objective=Objective.PER_GPU).candidates())
        for num in (32, 256)
    ]
    assert nums[1] < 32 * nums[0]  # not 64 times


def test_the_time_limit_ends_the_search_with_an_answer() -> None:
    search = rigs.search()
    found = search.run(Watch(is_over=lambda: True))
    assert found.is_cut_short
    assert {trial.candidate.is_mixed for trial in found.trials} == {True, False}
    assert found.num_runs == len(found.trials)


def test_progress_is_told_and_never_passes_the_total() -> None:
    told: list[tuple[int, int]] = []
    rigs.search().run(Watch(on_progress=lambda done, total, what: told.append((done, total))))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert all(done <= total for done, total in told)
    assert told[-1][0] == told[-1][1]


def test_a_simulation_agrees_with_the_closed_form_about_half_its_rate_and_twice() -> None:
    search = rigs.search()
    for is_mixed in (True, False):
        row = next(row for row in search.ranked() if row.candidate.is_mixed is is_mixed)
        low = search.bench.run(row.candidate, row.estimate_per_s / 2, 60)
        high = search.bench.run(row.candidate, row.estimate_per_s * 3, 400)
        assert low.attainment >= 0.9, row
        assert high.attainment < 0.9, row


def test_advice_says_dont_where_little_is_asked() -> None:
    found = advise(rigs.search(4, Slo(2.0, 0.05)))
    assert found.verdict is Verdict.MIXED
    assert found.is_enough
    assert found.reasons[0].startswith("don't split")
    assert found.thumb.startswith("don't")


def test_advice_says_split_where_mixed_can_do_nothing() -> None:
    """A step with the smallest chunk of a prompt is longer than TPOT; a decode step is not."""
    asked = rigs.traffic(rate_per_s=3.0, prompt=6000.0, output=30.0)
    fleet = rigs.fleet(4, "a100", gpus_per_node=1)
    found = advise(Search(fleet, asked, Target(Slo(3.0, 0.0155)), effort=rigs.QUICK))
    assert found.verdict is Verdict.DISAGGREGATED, found.reasons
    assert found.gain > 1.1


def test_a_cheaper_wire_shows_in_the_network_card() -> None:
    fleet = rigs.fleet()
    assert 1.8 < wire_gain(fleet, KvWire.INT8) < 2.0
    assert wire_gain(rigs.fleet(kv=Precision.FP8), KvWire.INT8) == 1.0
    cut = Cut("H100-SXM", 1)
    pools = (PoolPlan(Role.PREFILL, 1, cut, 2048), PoolPlan(Role.DECODE, 2, cut, 2048))
    native, narrow = (worker_specs(Candidate(pools, 0, wire), Steps(fleet), 4096) for wire in KvWire)
    assert [spec.name for spec in native] == ["prefill-0", "decode-0", "decode-1"]
    gain = narrow[0].nic.bandwidth_bytes_s / native[0].nic.bandwidth_bytes_s
    assert gain == pytest.approx(wire_gain(fleet, KvWire.INT8))


def test_a_worker_has_its_devices_cards_or_their_share_of_the_nodes_ports() -> None:
    def card(link: str, tp: int) -> float:
        own = network_card(rigs.fleet(link=link), Cut("H100-SXM", tp), KvWire.NATIVE)
        return own.bandwidth_bytes_s / catalogue.link(link).bytes_s

    assert [card("IB-NDR", tp) for tp in (1, 4, 8)] == [1, 4, 8]
    assert [card("RoCE-4x400G", tp) for tp in (1, 4, 8)] == [1 / 8, 1 / 2, 1]
    assert [card("TCP-100G", tp) for tp in (1, 4, 8)] == [1, 1, 1]


def test_goodput_lies_between_the_rates_that_were_tried() -> None:
    def point(rate: float, attainment: float) -> Point:
        return Point(rate, 10, attainment, 0.1, 0.1, 0.1, Stage.DECODE, 0.0, 1.0)

    assert goodput_of([], 0.9) == 0
    assert goodput_of([point(2, 0.5)], 0.9) == 0
    assert goodput_of([point(4, 0.8), point(2, 1.0)], 0.9) == pytest.approx(3.0)


def test_no_rate_is_tried_at_which_all_requests_come_before_the_first_answers_end() -> None:
    """Long answers and few requests: every rate would hold."""
    target = Target(Slo(5.0, 0.05))
    search = Search(rigs.fleet(1), rigs.traffic(prompt=50.0, output=400.0), target, effort=rigs.QUICK)
    pool = PoolPlan(Role.MIXED, 1, Cut("H100-SXM", 1), 2048, max_running=256)
    trial = search.bench.goodput(Candidate((pool,)), 1000.0, num_requests=60, num_runs=4)
    fastest_s = min(point.tpot_s for point in trial.points) * search.traffic.mean_output
    assert all(point.attainment == 1.0 for point in trial.points)
    assert 0 < trial.goodput_per_s <= 60 / fastest_s


def test_what_does_not_fit_is_said_in_gigabytes() -> None:
    with pytest.raises(ConfigurationError, match=r"Llama-3.1-405B .* \d+\.\d GB too much"):
        Search(rigs.fleet(4, model="Llama-3.1-405B"), TRAFFIC, Target(Slo()))


def test_targets_below_a_floor_name_the_floor() -> None:
    with pytest.raises(ConfigurationError, match=r"a prompt of \d+ tokens .* takes .* s of prefill"):
        rigs.search(slo=Slo(0.001, 0.05))
    with pytest.raises(ConfigurationError, match=r"reading the weights .* is .* ms"):
        rigs.search(slo=Slo(2.0, 0.0005))


def test_a_floor_that_is_named_is_one() -> None:
    """Nobody reads that prompt faster: with half of it as target an idle fleet misses, with twice it attains."""
    floor = prompt_floor(rigs.search().steps, TRAFFIC, Target(Slo()))
    pool = PoolPlan(Role.MIXED, 4 // floor.cut.num_gpus, floor.cut, 8192, 8192)
    for factor, attains in ((0.5, False), (2.0, True)):
        target = Target(Slo(factor * floor.alone_s, 0.05))
        point = Bench(rigs.search().steps, TRAFFIC, target, 0).run(Candidate((pool,)), 0.2, 60)
        assert (point.attainment >= 0.9) is attains
        assert point.ttft_s >= 0.9 * floor.alone_s


def test_no_price_no_plan_per_dollar() -> None:
    with pytest.raises(ConfigurationError, match="no price of L4"):
        Search(rigs.fleet(8, "l4"), TRAFFIC, Target(Slo(5.0, 0.1)), objective=Objective.PER_DOLLAR)
