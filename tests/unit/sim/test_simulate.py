"""Whole simulations: times that can be added up by hand, both fidelities, unlike workers, faults."""

import math

import msgspec
import pytest
from tests.unit.sim.rigs import SLOW, LinearSteps, pools, scenario, work, worker

from disagg.bench.arrivals import EvenArrivals, PoissonArrivals
from disagg.bench.workload import ClosedWork, Lengths, PrefixPool, SessionWork
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.roles import HandoffMode, Role
from disagg.sim.outcome import Outcome, Stage
from disagg.sim.records import RequestRecord
from disagg.sim.scenario import Fidelity, Link, LinkBreaks, SiteLine, Slo, WorkerDies, WorkerDrains, WorkerSlows
from disagg.sim.simulate import simulate

BOTH = pytest.mark.parametrize("fidelity", list(Fidelity))


def one_request(fidelity: Fidelity, **more: object) -> RequestRecord:
    asked = work(1, prompt=Lengths(256), output=Lengths(5), prefixes=PrefixPool(), arrivals=EvenArrivals(1.0))
    (record,) = simulate(scenario(pools(1, 1, **more), asked, fidelity), 0).records
    return record


@BOTH
def test_one_request_takes_what_its_parts_take(fidelity: Fidelity) -> None:
    record = one_request(fidelity)
    assert (record.end, record.path, record.num_output_tokens) == ("finished", "remote", 5)
    # Start, question and answer of the reservation, the chunk, the first token's way to the router.
    assert record.ttft_s == pytest.approx(4 * 1e-4 + 0.005 + 256e-4, abs=1e-9)
    assert record.queue_s == pytest.approx(3 * 1e-4, abs=1e-9)
    assert record.max_itl_s >= record.first_gap_s
    # Three steps of 5.5 ms, and the first gap: the last layers on the wire, fencing, a step.
    assert record.tpot_s * 4 - record.first_gap_s == pytest.approx(3 * 0.0055, abs=1e-9)
    assert 0.0055 < record.first_gap_s < 0.0065


@BOTH
def test_what_http_takes_is_part_of_the_ttft_and_of_nothing_else(fidelity: Fidelity) -> None:
    asked = work(1, prompt=Lengths(256), output=Lengths(5), prefixes=PrefixPool(), arrivals=EvenArrivals(1.0))
    plain, served = (
        next(iter(simulate(scenario(pools(1, 1), asked, fidelity, request_s=request_s), 0).records))
        for request_s in (0.0, 0.003)
    )
    assert served.arrived_s == plain.arrived_s
    assert served.ttft_s - plain.ttft_s == pytest.approx(0.003)
    assert served.tpot_s == pytest.approx(plain.tpot_s)


@BOTH
def test_a_slow_link_shows_in_the_first_gap_only(fidelity: Fidelity) -> None:
    fast, slow = one_request(fidelity), one_request(fidelity, nic=SLOW)
    assert slow.ttft_s == fast.ttft_s
    # 8 MiB at 200 MB/s, less what is sent while the chunk's layers are computed.
    assert 0.01 < slow.first_gap_s - fast.first_gap_s < 0.042


@BOTH
def test_sending_after_the_prompt_is_seen_whole(fidelity: Fidelity) -> None:
    layerwise = one_request(fidelity, nic=SLOW)
    sync = one_request(fidelity, nic=SLOW, handoff_mode=HandoffMode.SYNC)
    assert sync.first_gap_s - layerwise.first_gap_s > 0.01
    assert sync.first_gap_s == pytest.approx(0.0055 + 256 * 32_768 / 2e8, rel=0.1)


def close(one: float, other: float, share: float) -> bool:
    return math.isclose(one, other, rel_tol=share, abs_tol=2e-4)


@pytest.mark.parametrize(
    ("nic", "share"), [(Link(), 0.03), (Link(1e9, 1e-4), 0.03), (SLOW, 0.4)], ids=["fast", "moderate", "half busy"]
)
def test_both_fidelities_agree(nic: Link, share: float) -> None:
    """Within 3 %; where links are busy half of the time, queues are shorter than shares: within 40 %."""
    asked = work(120, rate_per_s=20)
    outcomes = [simulate(scenario(pools(2, 2, nic=nic), asked, fidelity), 3).report for fidelity in Fidelity]
    small, large = outcomes
    assert small.num_finished == large.num_finished == 120
    assert small.num_output_tokens == large.num_output_tokens
    assert {path.path for path in small.paths} == {path.path for path in large.paths}
    for name in ("ttft_s", "tpot_s", "itl_s"):
        one, other = getattr(small, name), getattr(large, name)
        assert all(close(getattr(one, p), getattr(other, p), share) for p in ("mean", "p50", "p90")), (name, one, other)
    assert close(small.attainment, large.attainment, 0.02)


def test_both_fidelities_decide_the_same_where_no_times_tie() -> None:
    """Few requests, far apart: nothing hangs on microseconds."""
    asked = work(30, arrivals=EvenArrivals(1.5))
    small, large = (simulate(scenario(pools(2, 2), asked, fidelity), 3).report for fidelity in Fidelity)
    assert small.decisions_digest == large.decisions_digest
    assert small.num_decisions == large.num_decisions == 60


@BOTH
def test_shared_prefixes_are_read_once(fidelity: Fidelity) -> None:
    asked = work(30, prompt=Lengths(40), prefixes=PrefixPool(1, 960), arrivals=EvenArrivals(2.0))
    report = simulate(scenario(pools(1, 1), asked, fidelity), 0).report
    assert report.num_cached_tokens == 29 * 960


@BOTH
def test_a_conversation_finds_what_it_said(fidelity: Fidelity) -> None:
    talk = SessionWork(
        num_sessions=3,
        arrivals=PoissonArrivals(1),
        num_turns=Lengths(4),
        message=Lengths(100),
        output=Lengths(30),
    )
    report = simulate(scenario((worker("m", Role.MIXED),), talk, fidelity), 0).report
    assert report.num_finished == 12
    # Turns 2 to 4 find all full blocks of what was said: 129, 259 and 389 tokens have KV.
    assert report.num_cached_tokens == 3 * (128 + 256 + 384)


@BOTH
def test_a_closed_loop_never_has_more_open_than_clients(fidelity: Fidelity) -> None:
    outcome = simulate(scenario(pools(1, 1), ClosedWork(work(30), num_clients=3), fidelity), 0)
    records = sorted(outcome.records, key=lambda record: record.arrived_s)
    assert len(records) == 30
    for record in records:
        assert sum(each.arrived_s <= record.arrived_s < each.ended_s for each in records) <= 3


@BOTH
def test_models_keep_to_their_own_workers(fidelity: Fidelity) -> None:
    fast, slow = LinearSteps(), LinearSteps(prompt_token_s=4e-4, num_layers=4)
    workers = (
        worker("a-p", Role.PREFILL, model="a", steps=fast),
        worker("a-d", Role.DECODE, model="a", steps=fast),
        worker("b-m", Role.MIXED, model="b", steps=slow),
    )
    outcome = simulate(scenario(workers, work(40, models=("a", "b")), fidelity), 0)
    assert {path.path for path in outcome.report.paths} == {"remote", "mixed"}
    assert all(use.num_steps for use in outcome.report.workers)
    assert outcome.report.num_finished == 40


@BOTH
def test_a_line_between_sites_is_shared_by_all_that_cross_it(fidelity: Fidelity) -> None:
    def gap(*lines: SiteLine) -> float:
        workers = (
            *(worker(f"p{index}", Role.PREFILL, site="north") for index in range(3)),
            *(worker(f"d{index}", Role.DECODE, site="south") for index in range(3)),
        )
        return simulate(scenario(workers, work(30), fidelity, lines=lines), 0).report.first_gap_s.mean

    wan = SiteLine("north", "south", Link(bandwidth_bytes_s=1e9, latency_s=0.02))
    assert gap(wan) > max(gap(), 0.02)  # a first step may begin meanwhile, so its time need not come on top


@BOTH
def test_what_workers_of_two_sites_say_to_each_other_takes_the_lines_time(fidelity: Fidelity) -> None:
    asked = work(1, prompt=Lengths(256), output=Lengths(5), prefixes=PrefixPool(), arrivals=EvenArrivals(1.0))
    workers = (worker("p", Role.PREFILL, site="north"), worker("d", Role.DECODE, site="south"))
    ways = (("north", "south"), ("south", "north"))
    lines = tuple(SiteLine(source, target, Link(latency_s=0.02)) for source, target in ways)
    near, far = (
        next(iter(simulate(scenario(workers, asked, fidelity, lines=each), 0).records)) for each in ((), lines)
    )
    assert far.ttft_s - near.ttft_s == pytest.approx(2 * 0.02)  # the reservation's question and its answer
    assert far.first_gap_s - near.first_gap_s > 0.014  # the last bytes; a first step may begin meanwhile


def test_what_misses_the_targets_is_put_down_to_a_stage() -> None:
    crowded = simulate(scenario(pools(1, 3), work(60, rate_per_s=60), Fidelity.LARGE, slo=Slo(0.3, 0.1)), 0).report
    assert crowded.limiting_stage is Stage.PREFILL_QUEUE
    assert crowded.attainment < 0.9
    slow = simulate(scenario(pools(3, 1), work(60, rate_per_s=60), Fidelity.LARGE, slo=Slo(9.0, 0.006)), 0).report
    assert slow.limiting_stage is Stage.DECODE
    far = simulate(scenario(pools(3, 1, nic=SLOW), work(30), Fidelity.LARGE, slo=Slo(9.0, 0.0085)), 0).report
    assert far.limiting_stage is Stage.HANDOFF
    assert sum(each.num_requests for each in far.missed_by) == 30 - round(30 * far.attainment)


@BOTH
def test_too_much_is_turned_away_and_counted(fidelity: Fidelity) -> None:
    report = simulate(scenario(pools(1, 1), work(80, rate_per_s=100), fidelity, max_open_requests=5), 0).report
    assert report.num_turned_away > 10
    assert report.num_finished + report.num_turned_away == 80
    totals = {(count.name, count.label): count.total for count in report.fallbacks}
    assert totals[("disagg_rejections_total", "too_many_requests")] == report.num_turned_away


@BOTH
def test_who_finds_no_room_is_told_when_there_is_some_and_does_not_ask_all_the_time(fidelity: Fidelity) -> None:
    asked = work(40, rate_per_s=50, prompt=Lengths(300), output=Lengths(60), prefixes=PrefixPool())
    workers = pools(2, 1, num_blocks=70)
    report = simulate(scenario(workers, asked, fidelity, max_claimed_share=1e9), 0).report
    totals = {(count.name, count.label): count.total for count in report.fallbacks}
    assert report.num_finished == 40
    assert 15 < totals[("disagg_reservations_refused_total", "overloaded")] < 2 * 40


FAULTS = {
    "prefill dies": (WorkerDies(1.0, "prefill-0"),),
    "decode dies": (WorkerDies(1.0, "decode-0"),),
    "decode comes back": (WorkerDies(1.0, "decode-0", 0.5), WorkerDies(3.0, "decode-0", 2.0)),
    "all of a kind": (WorkerDies(1.0, "decode-0", 2.0), WorkerDies(1.1, "decode-1", 2.0)),
    "link": (LinkBreaks(0.5, "prefill-0", "decode-0", 2.0), LinkBreaks(0.8, "decode-1", "prefill-0", 1.0)),
    "drain": (WorkerDrains(1.0, "decode-1"), WorkerDrains(1.5, "prefill-1")),
}


@BOTH
@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_loses_an_answer(fidelity: Fidelity, name: str) -> None:
    asked = work(25, rate_per_s=10, output=Lengths(60, 30))
    faults = FAULTS[name]
    outcome = simulate(scenario(pools(2, 2, nic=SLOW), asked, fidelity, faults=faults, detect_s=0.2), 1)
    assert outcome.report.num_finished == 25
    assert all(record.num_output_tokens for record in outcome.records)
    moves = [count for count in outcome.report.fallbacks if count.name == "disagg_moves_total"]
    assert moves or name in ("link", "drain")


def test_a_worker_that_is_added_takes_work_from_then_on() -> None:
    late = worker("prefill-1", Role.PREFILL, ready_after_s=0.5)
    few = simulate(scenario(pools(1, 1), work(60, rate_per_s=20), Fidelity.LARGE), 0).report
    more = simulate(scenario((*pools(1, 1), late), work(60, rate_per_s=20), Fidelity.LARGE), 0).report
    assert more.ttft_s.mean < 0.9 * few.ttft_s.mean
    assert next(use for use in more.workers if use.name == "prefill-1").num_steps > 0


ALIKE = {
    "pools": scenario(pools(2, 2), work(80, rate_per_s=15, output=Lengths(120, 100)), Fidelity.LARGE),
    "little room": scenario(
        pools(1, 1, num_blocks=70, answer_headroom=16),
        work(60, rate_per_s=10, prompt=Lengths(200, 100), output=Lengths(150, 140)),
        Fidelity.LARGE,
    ),
    "mixed": scenario(
        (worker("mixed-0", Role.MIXED, itl_target_s=0.02),),
        ClosedWork(work(40, output=Lengths(200, 150)), num_clients=6),
        Fidelity.LARGE,
    ),
    "a death, a drain, a cut, a slow one": scenario(
        pools(2, 3),
        work(80, rate_per_s=15, output=Lengths(120, 100)),
        Fidelity.LARGE,
        faults=(
            WorkerDies(1.2345, "decode-0", restart_after_s=3.0),
            WorkerDrains(2.3456, "decode-1"),
            LinkBreaks(3.4567, "prefill-0", "decode-2", for_s=1.0),
            WorkerSlows(1.7531, "decode-2", prompts=1.5, streams=2.0),
            WorkerSlows(4.1117, "decode-2", streams=0.7),
        ),
    ),
}


@pytest.mark.parametrize("seed", [4, 11])
@pytest.mark.parametrize("name", ALIKE)
def test_steps_that_are_one_event_change_nothing(name: str, seed: int) -> None:
    together, alone = (simulate(msgspec.structs.replace(ALIKE[name], max_alike_steps=most), seed) for most in (64, 1))
    assert together.records.fingerprint() == alone.records.fingerprint()
    assert together.report.decisions_digest == alone.report.decisions_digest
    assert together.report.fallbacks == alone.report.fallbacks
    assert [use.num_steps for use in together.report.workers] == [use.num_steps for use in alone.report.workers]
    assert together.report.itl_s.num == alone.report.itl_s.num
    assert together.report.itl_s.p99 == alone.report.itl_s.p99
    assert together.report.num_events < alone.report.num_events


def test_streams_that_nothing_disturbs_take_few_events() -> None:
    """Four streams of a thousand tokens: an event of its own has the step that fills a block, not the others."""
    asked = work(4, arrivals=EvenArrivals(1e6), prompt=Lengths(32), output=Lengths(1000), prefixes=PrefixPool())
    report = simulate(scenario((worker("m", Role.MIXED, num_blocks=999),), asked, Fidelity.LARGE), 0).report
    assert report.num_output_tokens == 4000
    assert report.workers[0].num_steps >= 1000
    assert report.num_events < 300


def test_the_same_seed_gives_the_same_bytes_and_another_other_ones() -> None:
    def run(seed: int) -> Outcome:
        return simulate(scenario(pools(1, 2), work(15), Fidelity.SMALL), seed)

    assert run(4).to_bytes() == run(4).to_bytes()
    assert run(4).to_bytes() != run(5).to_bytes()


def test_scenarios_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="names worker 'gone'; there is prefill-0, decode-0"):
        scenario(pools(1, 1), work(), faults=(WorkerDies(1.0, "gone"),))
    with pytest.raises(ConfigurationError, match="each with its own name"):
        scenario((*pools(1, 1), *pools(1, 1)), work())
    with pytest.raises(ConfigurationError, match="worker prefill-0 has room for 0 KV blocks"):
        simulate(scenario(pools(1, 1, num_blocks=0), work()), 0)


def test_a_run_that_does_not_end_is_given_up() -> None:
    with pytest.raises(InternalFault, match=r"open after 0\.5 s"):
        simulate(scenario(pools(1, 1), work(40), Fidelity.SMALL, limit_s=0.5), 0)


@BOTH
def test_a_worker_that_slows_down_takes_longer_from_then_on(fidelity: Fidelity) -> None:
    asked = work(6, prompt=Lengths(256), output=Lengths(30), prefixes=PrefixPool(), arrivals=EvenArrivals(0.5))
    slows = (WorkerSlows(3.0, "prefill-0", prompts=2.0), WorkerSlows(7.0, "decode-0", streams=3.0))
    plain, slowed = (
        sorted(simulate(scenario(pools(1, 1), asked, fidelity, faults=faults), 0).records, key=lambda each: each.number)
        for faults in ((), slows)
    )
    step_s = 0.005 + 256e-4
    for number, (one, other) in enumerate(zip(plain, slowed, strict=True)):  # number n comes at 2 n seconds
        assert other.ttft_s - one.ttft_s == pytest.approx(step_s if number >= 2 else 0.0, abs=1e-9)
        assert other.tpot_s == pytest.approx(3 * one.tpot_s if number >= 4 else one.tpot_s, rel=0.05)


@BOTH
def test_who_comes_in_the_place_of_a_slow_worker_is_as_slow(fidelity: Fidelity) -> None:
    asked = work(20, rate_per_s=10, prefixes=PrefixPool())
    dies = WorkerDies(1.0, "prefill-0", restart_after_s=0.5)
    plain, slowed = (
        simulate(scenario(pools(1, 1), asked, fidelity, faults=(dies, *slows), detect_s=0.2), 1).report
        for slows in ((), (WorkerSlows(0.0, "prefill-0", prompts=4.0),))
    )
    assert plain.num_finished == slowed.num_finished == 20
    steps = [use.steps[0].mean_s for report in (plain, slowed) for use in report.workers if use.name == "prefill-0"]
    assert steps[1] > 2 * steps[0]


def test_a_worker_cannot_take_no_time() -> None:
    with pytest.raises(ConfigurationError, match="1 is as described"):
        WorkerSlows(0.0, "prefill-0", prompts=0.0)


def test_workers_that_cannot_serve_their_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="nobody can serve 'model': all of its workers are prefill; give it"):
        scenario(pools(2, 0), work())
    others = (worker("b-m", Role.MIXED, model="b"), worker("a-d", Role.DECODE, model="a"))
    with pytest.raises(ConfigurationError, match="nobody can serve 'a': all of its workers are decode"):
        scenario(others, work(models=("a", "b")))
