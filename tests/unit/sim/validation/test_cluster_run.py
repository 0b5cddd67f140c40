"""Published clusters in the simulator's terms, and chats of published lengths."""

import random
import statistics

import pytest

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.workload import ClosedWork
from disagg.core.errors import ConfigurationError
from disagg.core.roles import HandoffMode, Role
from disagg.sim.validation.chat_work import ChatWork, draw_pair, uncut_means
from disagg.sim.validation.cluster_run import run_scenario, simulated_form
from disagg.sim.validation.scenario import Lengths, Load, Scenario
from disagg.sim.validation.scenario_cases import apart, together, under


def split() -> Scenario:
    return under(apart("OPT-13B", (2, 1), (1, 1), 0.25, 0.1), 1.0, 20)


def test_means_are_those_published_and_no_pair_is_too_long() -> None:
    scales = uncut_means(755.5, 200.3, 2048)
    rng = random.Random(1)
    pairs = [draw_pair(rng, *scales, 2048) for _ in range(20_000)]
    prompts, answers = zip(*pairs, strict=True)
    assert statistics.mean(prompts) == pytest.approx(755.5, rel=0.03)
    assert statistics.mean(answers) == pytest.approx(200.3, rel=0.03)
    assert max(map(sum, pairs)) < 2048
    assert min(prompts) >= 1
    assert min(answers) >= 1


def test_means_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="do not fit into 900"):
        uncut_means(755.5, 200.3, 900)


def test_earlier_chats_go_first() -> None:
    work = ChatWork(num_requests=5, arrivals=EvenArrivals(1.0), mean_prompt=80, mean_answer=9, max_total=400)
    stream = work.start(random.Random(0))
    requests = [request for _ in range(6) if (request := stream.next_request()) is not None]
    assert [request.number for request in requests] == [0, 1, 2, 3, 4]
    assert [request.priority for request in requests] == [0, -1, -2, -3, -4]


def test_workers_keep_their_limits_and_decode_has_the_room_of_what_is_parked() -> None:
    prefill, decode = simulated_form(split()).workers
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert (prefill.chunk_tokens, prefill.max_running, decode.max_running) == (8192, 128, 1024)
    assert prefill.handoff_mode is HandoffMode.SYNC
    rooms = [worker.steps.max_kv_tokens(16) // 16 for worker in (prefill, decode)]
    assert [prefill.blocks(), decode.blocks()] == [rooms[0], sum(rooms)]
    (mixed,) = simulated_form(under(together("OPT-13B", 1, 0.25, 0.1), 1.0, 20)).workers
    assert mixed.blocks() == mixed.steps.max_kv_tokens(16) // 16
    assert mixed.mixed_chunk_tokens == mixed.chunk_tokens == 16384


def test_light_load_attains_and_overload_does_not() -> None:
    light, heavy = (run_scenario(under(split(), rate, 20)) for rate in (0.1, 9.0))
    assert light.attainment > 0.9 > heavy.attainment
    assert 0.02 < light.ttft_mean_s < 0.25
    assert 0.015 < light.tpot_mean_s < 0.05


def test_closed_loops_stay_closed() -> None:
    load = Load(Lengths.EVEN, 64, 8, num_requests=12, concurrency=3)
    groups = together("OPT-13B", 1, 0.25, 0.1).groups
    scenario = Scenario("loop", groups, "NVLink3", load, 1.0, 1.0)
    work = simulated_form(scenario).work
    assert isinstance(work, ClosedWork)
    assert work.num_clients == 3
    assert run_scenario(scenario).attainment == 1.0


def test_lengths_of_a_loop_lie_within_its_spread() -> None:
    load = Load(Lengths.EVEN, 90, 45, num_requests=200, concurrency=1, spread=1 / 9)
    groups = together("OPT-13B", 1, 0.25, 0.1).groups
    work = simulated_form(Scenario("loop", groups, "NVLink3", load, 1.0, 1.0)).work
    assert isinstance(work, ClosedWork)
    rng = random.Random(0)
    prompts, answers = zip(*((work.work.prompt.draw(rng), work.work.output.draw(rng)) for _ in range(500)), strict=True)
    assert (min(prompts), max(prompts)) == (80, 100)
    assert (min(answers), max(answers)) == (40, 50)


def test_the_mixed_engine_of_2023_reads_prompts_alone() -> None:
    assert [spec.prompts_alone for spec in simulated_form(split()).workers] == [False, False]
    (mixed,) = simulated_form(under(together("OPT-13B", 1, 0.25, 0.1), 1.0, 20)).workers
    assert mixed.prompts_alone


def test_chats_need_a_clock_and_a_limit() -> None:
    load = Load(Lengths.SHAREGPT, 64, 8, num_requests=12, concurrency=3)
    with pytest.raises(ConfigurationError, match="arrival rate"):
        simulated_form(Scenario("x", together("OPT-13B", 1, 0.25, 0.1).groups, "NVLink3", load, 1.0, 1.0))
