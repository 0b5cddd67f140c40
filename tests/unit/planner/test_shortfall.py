"""Where a fleet is too small: what is said of floors, and how much wider targets would be kept."""

import re

from tests.unit.planner import rigs

from disagg.planner.advise import advise
from disagg.planner.estimate import Target
from disagg.planner.floors import WHOLE, prompt_floor
from disagg.planner.measure import Bench
from disagg.planner.search import Search
from disagg.sim.scenario import Slo


def test_targets_so_many_times_as_wide_are_kept_and_narrower_ones_are_not() -> None:
    search = rigs.search(1, Slo(1.0, 0.02))
    row = search.ranked()[0]
    rate = 3 * row.estimate_per_s
    point = search.bench.run(row.candidate, rate, 200)
    assert point.attainment < 0.9
    assert point.slo_scale > 1
    for factor, is_kept in ((1.001, True), (0.999, False)):
        slo = Slo(1.0 * point.slo_scale * factor, 0.02 * point.slo_scale * factor)
        wider = Bench(search.steps, search.traffic, Target(slo), 0).run(row.candidate, rate, 200)
        assert (wider.attainment >= 0.9) is is_kept


def test_what_is_kept_needs_no_wider_targets() -> None:
    search = rigs.search(4, Slo(5.0, 0.1))
    point = search.bench.run(search.ranked()[0].candidate, 1.0, 60)
    assert point.attainment == 1.0
    assert point.slo_scale <= 1


def test_advice_for_too_small_a_fleet_names_the_floors_and_what_would_be_kept() -> None:
    asked = rigs.traffic(rate_per_s=200.0)
    found = advise(Search(rigs.fleet(1), asked, Target(Slo(1.0, 0.02)), effort=rigs.QUICK))
    assert not found.is_enough
    text = "\n".join(found.reasons)
    alone = re.search(r"have up to (\d+) tokens .*, ([\d.]+) s alone on the fastest worker", text)
    assert alone is not None
    assert float(alone[2]) < 1.0
    busy = re.search(r"reading alone keeps ([\d.]+) of 1 GPUs busy", text)
    assert busy is not None
    assert float(busy[1]) > 1
    wider = re.search(r"mixed keeps, at what is asked, targets ([\d.]+) times as wide", text)
    assert wider is not None
    assert float(wider[1]) > 1


def test_a_fleet_that_is_enough_is_told_of_no_floor() -> None:
    found = advise(rigs.search(4, Slo(2.0, 0.05)))
    assert not any("floor" in reason for reason in found.reasons)


def test_the_floor_is_the_time_of_that_prompt_on_the_fastest_cut() -> None:
    search = rigs.search(4, Slo(2.0, 0.05))
    floor = prompt_floor(search.steps, search.traffic, search.target)
    lengths = sorted(search.traffic.uncached)
    assert floor.num_tokens == lengths[int(0.9 * (len(lengths) - 1))]
    others = (search.estimator.prompt_s(cut, floor.num_tokens, 0, WHOLE) for cut in search.steps.cuts())
    assert floor.alone_s <= min(others) * (1 + 1e-9)
