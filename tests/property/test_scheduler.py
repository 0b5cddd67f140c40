"""One scheduler and a fake engine in virtual time: random work, and what must hold whatever comes.

Rules after every event; every answer right; a step runs whenever one can; nobody waits for ever; tenants get their
share; running streams keep their pace; and ten thousand requests leave nothing behind.
"""

import random
import statistics
import time
from collections.abc import Iterator
from itertools import count

import pytest
from tests.property.scheduler_site import COSTS, LAYOUT, VOCAB, Site, sequence_id, shape_of

from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.spans import KvLayout
from disagg.policy.batching import AGEING, StepBudget, itl_target_s
from disagg.policy.fairness import MAX_IDLE
from disagg.policy.step_time import StepCosts, StepShape
from disagg.scheduler import events
from disagg.scheduler.actions import Action
from disagg.scheduler.engine import StepPlan
from disagg.scheduler.scheduler import Scheduler
from disagg.scheduler.state import MAX_REMEMBERED
from disagg.telemetry.metrics import PREEMPTIONS
from disagg.testing.engine import FakeEngine, expected_tokens


def draw_spec(rng: random.Random, number: int) -> SequenceSpec:
    """Half share a prefix; some are as large as the pool."""
    prefix = [990 + rng.randrange(3)] * rng.choice([0, 0, 6, 16])
    length = rng.choice([2, 5, 20, 60, 150])
    prompt = tuple(prefix + [rng.randrange(900) for _ in range(rng.randint(2, length))])
    return SequenceSpec(
        sequence_id(number),
        prompt,
        SamplingParams(rng.randint(1, 30), temperature=0.0),
        priority=rng.choice([0, 0, 0, 1]),
        tenant=rng.choice(["", "a", "b"]),
        cache_salt=rng.choice(["", "", "salt"]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_rules_hold_and_every_answer_is_right(seed: int) -> None:
    """Arrivals, aborts, tenants, priorities, a pool too small for all: preemptions among them."""
    rng = random.Random(seed)
    num_blocks = rng.choice([50, 64, 120])
    budget = StepBudget(rng.choice([16, 64]), rng.choice([4, 16]), rng.choice([2, 8]), rng.choice([0.0, 0.02, 0.05]))
    site = Site(num_blocks=num_blocks, budget=budget, engine=FakeEngine(LAYOUT, num_blocks, VOCAB))
    for number in range(30):
        spec, when_s = draw_spec(rng, number), site.now_s + rng.uniform(0, 2)
        site.at(when_s, lambda spec=spec: site.start(spec))  # type: ignore[misc]
        if rng.random() < 0.2:
            site.at(when_s + rng.uniform(0, 0.5), lambda number=number: site.abort(sequence_id(number)))  # type: ignore[misc]
    site.run()
    assert site.ended | site.aborted == site.specs.keys()
    assert site.scheduler.is_idle
    state = site.scheduler.snapshot()
    assert state.num_free_blocks + state.num_cached_blocks == num_blocks
    for spec in site.specs.values():
        answer = site.answers[spec.sequence_id]
        expected = expected_tokens(LAYOUT, spec.sequence_id, spec.prompt_ids, spec.sampling, VOCAB)
        assert answer == expected if spec.sequence_id in site.ended else answer == expected[: len(answer)]


def test_these_schedules_do_preempt() -> None:
    site = Site(num_blocks=50, budget=StepBudget(32, 8, 8))
    for number in range(8):
        site.start(SequenceSpec(sequence_id(number), tuple(range(number, number + 20)), SamplingParams(80)))
    site.run()
    assert site.scheduler.counters.get(PREEMPTIONS) > 0
    assert len(site.ended) == 8


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_long_prompt_is_read_in_bounded_time_among_endless_short_ones(max_running: int) -> None:
    """Short prompts come faster than they can be read, for ever."""
    rng = random.Random(max_running)
    site = Site(num_blocks=1000, budget=StepBudget(64, 16, max_running))
    numbers = count(1)

    def short() -> None:
        prompt = tuple(rng.randrange(900) for _ in range(20))
        site.start(SequenceSpec(sequence_id(next(numbers)), prompt, SamplingParams(1)))
        site.at(site.now_s + 0.01, short)

    short()
    site.run(until=lambda: len(site.ended) > 30)
    began_s = site.now_s
    site.start(SequenceSpec(sequence_id(0), tuple(rng.randrange(900) for _ in range(1000)), SamplingParams(1)))
    site.run(until=lambda: sequence_id(0) in site.ended or site.now_s > began_s + 60)
    alone_s = COSTS.chunk_s(0, 1000)
    # What came before its bound is read before it, at up to 100 arrivals a second of some 30 ms each.
    bound_s = alone_s / AGEING
    assert site.now_s - began_s < 5 * bound_s
    assert site.now_s - began_s > alone_s * 2  # short ones did overtake it


@pytest.mark.parametrize("tenant", ["", "other"])
def test_no_prompt_waits_for_ever_for_room(tenant: str) -> None:
    """Small ones always fit, one large one only when the pool is nearly empty."""
    rng = random.Random(3)
    site = Site(num_blocks=40, budget=StepBudget(64, 16, 8))
    numbers = count(1)

    def small() -> None:
        prompt = tuple(rng.randrange(900) for _ in range(8))
        site.start(SequenceSpec(sequence_id(next(numbers)), prompt, SamplingParams(20)))
        site.at(site.now_s + 0.03, small)

    small()
    site.run(until=lambda: len(site.ended) > 20)
    began_s = site.now_s
    prompt = tuple(rng.randrange(900) for _ in range(140))
    site.start(SequenceSpec(sequence_id(0), prompt, SamplingParams(4), tenant=tenant))
    site.run(until=lambda: sequence_id(0) in site.ended or site.now_s > began_s + 60)
    assert site.now_s - began_s < 10


@pytest.mark.parametrize("itl_target", [0.0, 0.05])
@pytest.mark.parametrize(("max_running", "num_blocks"), [(1, 1000), (4, 1000), (16, 1000), (16, 60)])
def test_a_tenant_with_a_tenth_of_the_requests_gets_half(itl_target: float, max_running: int, num_blocks: int) -> None:
    """Whether steps, places or blocks are what there is too little of."""
    rng = random.Random(7)
    site = Site(num_blocks=num_blocks, budget=StepBudget(64, 16, max_running, itl_target), checks=False)
    numbers = iter(rng.sample(range(1100), 1100))
    tenants = ["big"] * 1000 + ["small"] * 100
    rng.shuffle(tenants)
    for tenant, number in zip(tenants, numbers, strict=True):
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(10, 90)))
        site.start(SequenceSpec(sequence_id(number), prompt, SamplingParams(rng.randint(1, 8)), tenant=tenant))
    small = {name for name, spec in site.specs.items() if spec.tenant == "small"}
    site.run(until=lambda: len(small - site.ended) < 20)
    share = site.prompt_tokens["small"] / sum(site.prompt_tokens.values())
    assert 0.45 < share < 0.55


def test_a_burst_of_a_newcomer_does_not_stop_the_others() -> None:
    """A tenant that was away for long gets half from the start, not everything."""
    rng = random.Random(8)
    site = Site(num_blocks=1000, budget=StepBudget(64, 64, 4), checks=False)
    numbers = count()

    def burst(tenant: str, size: int) -> None:
        for _ in range(size):
            prompt = tuple(rng.randrange(900) for _ in range(50))
            site.start(SequenceSpec(sequence_id(next(numbers)), prompt, SamplingParams(1), tenant=tenant))

    burst("old", 600)
    site.run(until=lambda: len(site.ended) >= 200)
    burst("new", 300)
    before = dict(site.prompt_tokens)
    site.run(until=lambda: len(site.ended) >= 300)
    gained = [site.prompt_tokens[tenant] - before.get(tenant, 0) for tenant in ("old", "new")]
    assert 0.4 < gained[1] / sum(gained) < 0.6


def noise(rng: random.Random) -> Iterator[float]:
    """3 % either way; one step in 200 is paused."""
    while True:
        yield rng.gauss(1.0, 0.03) * (20.0 if rng.random() < 0.005 else 1.0)


@pytest.mark.parametrize("target", [0.04, 0.08])
@pytest.mark.parametrize("seed", range(3))
def test_streams_keep_their_pace_beside_prompts(seed: int, target: float) -> None:
    rng = random.Random(seed)
    factors = noise(random.Random(seed + 100))
    budget = StepBudget(512, 16, 24, itl_target_s=target)
    site = Site(num_blocks=20_000, budget=budget, noise=lambda: next(factors), checks=False)
    ratios: list[float] = []
    filled: list[float] = []

    def look(plan: StepPlan, duration_s: float) -> None:
        shape = shape_of(plan)
        if not shape.num_streams or not shape.num_prompt_tokens or len(site.ended) < 20:
            return
        streams = StepShape(num_streams=shape.num_streams, stream_context=shape.stream_context)
        goal_s = itl_target_s(streams, budget, COSTS)
        if duration_s < 10 * goal_s:  # not one of the paused
            ratios.append(duration_s / goal_s)
        if shape.num_prompt_tokens > 2 * LAYOUT.block_size:
            filled.append(COSTS.predict(shape) / goal_s)

    site.on_step = look
    for number in range(150):
        prompt = tuple(rng.randrange(900) for _ in range(rng.choice([30, 300, 1500])))
        spec = SequenceSpec(sequence_id(number), prompt, SamplingParams(rng.randint(10, 60)))
        site.at(site.now_s + number * 0.3, lambda spec=spec: site.start(spec))  # type: ignore[misc]
    site.run()
    ratios.sort()
    assert len(ratios) > 200
    assert ratios[int(0.99 * len(ratios))] < 1.15
    assert statistics.median(filled) > 0.9  # and prompts get what there is


def test_the_step_time_that_was_learned_is_in_the_snapshot() -> None:
    rng = random.Random(5)
    site = Site(num_blocks=20_000, budget=StepBudget(128, 16, 24, itl_target_s=0.05), checks=False)
    assert StepCosts(*site.scheduler.snapshot().step_costs) == StepCosts()
    for number in range(60):
        prompt = tuple(rng.randrange(900) for _ in range(rng.choice([30, 300])))
        site.start(SequenceSpec(sequence_id(number), prompt, SamplingParams(rng.randint(10, 60))))
    site.run()
    learned = StepCosts(*site.scheduler.snapshot().step_costs)
    for shape in (StepShape(num_streams=12, stream_context=3000), StepShape().add_chunk(0, 128)):
        assert learned.predict(shape) == pytest.approx(COSTS.predict(shape), rel=0.1)


def containers(scheduler: Scheduler) -> dict[str, int]:
    """Sizes of everything that a scheduler keeps, by path."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def walk(path: str, value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict | list | set | tuple) or hasattr(value, "popleft"):
            sizes[path] = len(value)  # type: ignore[arg-type]
        elif type(value).__module__.startswith("disagg."):
            names = getattr(value, "__dict__", None) or dict.fromkeys(getattr(type(value), "__slots__", ()))
            for name in names:
                walk(f"{path}.{name}", getattr(value, name))

    walk("scheduler", scheduler)
    return sizes


@pytest.mark.parametrize("batch", [16, 128])
def test_thousands_of_requests_leave_nothing_behind(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop of 1.5 x batch requests; planning is timed and printed, sizes are asserted."""
    rng = random.Random(batch)
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=16)
    num_blocks = 4096
    site = Site(
        num_blocks=num_blocks, budget=StepBudget(512, 128, batch, itl_target_s=1.0), layout=layout, checks=False
    )
    total, num_started = MAX_REMEMBERED + 1000, 0
    times: list[tuple[int, float]] = []
    handle = site.scheduler.handle

    def timed(event: events.Event, now_s: float) -> list[Action]:
        began_s = time.thread_time()
        actions = handle(event, now_s)
        if isinstance(event, events.StepFinished):
            times.append((len(event.result.tokens), time.thread_time() - began_s))
        return actions

    site.scheduler.handle = timed  # type: ignore[method-assign]

    def refill() -> None:
        nonlocal num_started
        while num_started < total and num_started - len(site.ended) < batch * 3 // 2:
            prompt = tuple(rng.randrange(900) for _ in range(rng.randint(4, 60)))
            tenant = f"t{rng.randrange(2000)}"
            sampling = SamplingParams(rng.randint(2, 60))
            site.start(SequenceSpec(sequence_id(num_started), prompt, sampling, tenant=tenant))
            num_started += 1

    while len(site.ended) < total:
        refill()
        site.run_until_one_ends()
    assert site.scheduler.is_idle
    del site.scheduler.handle
    site.scheduler.check_invariants()
    sizes = containers(site.scheduler)
    large = {path: size for path, size in sizes.items() if size > 32 and size != num_blocks}
    limits = {"_ended": MAX_REMEMBERED, "_idle": MAX_IDLE, "_index": num_blocks, "_free": num_blocks}
    for path, size in large.items():
        known = [limit for name, limit in limits.items() if name in path]
        assert known, f"{path} holds {size}"
        assert size <= known[0], path
    full = [1e6 * seconds for rows, seconds in times if rows >= 0.9 * batch]
    assert len(full) > 500
    halves = [statistics.median(half) for half in (full[: len(full) // 2], full[len(full) // 2 :])]
    with capsys.disabled():
        print(f"\nplanning at batch {batch}: {halves[0]:.0f} us a step at first, {halves[1]:.0f} at last")
