"""Sweeps: which steps are run, what is fitted to them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.core.errors import ConfigurationError
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import HandoffId
from disagg.core.spans import KvLayout
from disagg.kvcache.memory import Memory
from disagg.policy.step_time import StepCosts
from disagg.scheduler.engine import OnLayers, StepPlan, StepResult
from disagg.sim.hardware.fitted import learned_shape
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.hardware.sweep import SweepLimits, cells_of, fit_costs, measure, plan_of, sweep_shapes
from disagg.testing.memory import BytesMemory

LIMITS = SweepLimits(max_context=8192, kv_tokens=1 << 20)
COSTS = StepCosts(0.01, 1e-4, 1e-8, 5e-4, 1e-7)


class TimedEngine:
    """Moves its own clock by what each step costs; every third step is disturbed."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.now_s = 0.0
        self.num_steps = 0
        self.largest_block = -1

    @property
    def layout(self) -> KvLayout:
        return KvLayout(2, 1, 8, "float32", 16)

    @property
    def num_blocks(self) -> int:
        return 1 << 16

    @property
    def memory(self) -> Memory:
        return BytesMemory()

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        prefill = tuple((len(row.token_ids), row.position) for row in plan.rows if len(row.token_ids) > 1)
        streams = [row.position + 1 for row in plan.rows if len(row.token_ids) == 1]
        seconds = self.costs.predict(learned_shape(StepShape(prefill, sum(streams), len(streams))))
        self.num_steps += 1
        self.now_s += seconds * (50 if self.num_steps % 7 == 0 else 1)
        self.largest_block = max([self.largest_block, *(max(row.block_table) for row in plan.rows)])
        return StepResult(plan.step_id, ())

    def prepare_grammar(self, attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        raise NotImplementedError("no sweep asks for a grammar")


def test_costs_are_found_again_through_disturbed_steps() -> None:
    engine, rounds = TimedEngine(COSTS), list[int]()
    shapes = sweep_shapes(LIMITS)
    measured = measure(engine, shapes, repeats=5, limit_s=1e9, clock=lambda: engine.now_s, on_round=rounds.append)
    assert [shape for shape, _ in measured] == shapes
    assert rounds == [1, 2, 3, 4, 5, 6]
    assert engine.num_steps == 6 * len(shapes)
    found = fit_costs(measured)
    assert all(abs(cell.error) < 0.01 for cell in cells_of(measured, found))
    assert found.prompt_token_s == pytest.approx(COSTS.prompt_token_s, rel=0.05)
    assert found.context_token_s == pytest.approx(COSTS.context_token_s, rel=0.05)


def test_a_slow_machine_gets_one_round_that_counts_and_no_more() -> None:
    engine, rounds = TimedEngine(COSTS), list[int]()
    shapes = sweep_shapes(LIMITS)[:2]
    measured = measure(engine, shapes, repeats=5, limit_s=0.0, clock=lambda: engine.now_s, on_round=rounds.append)
    assert rounds == [1, 2]
    assert len(measured) == 2


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=30))
@settings(max_examples=20)
def test_fitted_costs_are_never_negative(times: list[float]) -> None:
    shapes = sweep_shapes(LIMITS)
    costs = fit_costs(list(zip(shapes, times, strict=False)))
    assert min(costs.base_s, costs.prompt_token_s, costs.prompt_pair_s, costs.stream_s, costs.context_token_s) >= 0


@given(
    context=st.integers(1, 5000), tokens=st.integers(1, 20_000), prompt=st.integers(1, 2000), streams=st.integers(1, 64)
)
def test_every_shape_fits_what_the_engine_holds(context: int, tokens: int, prompt: int, streams: int) -> None:
    limits = SweepLimits(context, tokens, prompt, streams)
    for shape in sweep_shapes(limits):
        rows = plan_of(shape, 1).rows
        assert sum(len(row.block_table) for row in rows) <= tokens
        assert all(row.position + len(row.token_ids) <= context for row in rows)
        assert all(new <= prompt for new, _ in shape.prefill)
        assert shape.num_decode <= streams


def test_rows_have_blocks_of_their_own() -> None:
    plan = plan_of(StepShape(((20, 10),), 3 * 17, 3), 16)
    assert [row.block_table for row in plan.rows] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(len(row.token_ids), row.position) for row in plan.rows] == [(20, 10), (1, 16), (1, 16), (1, 16)]


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(ConfigurationError, match="more KV blocks"):
        fit_costs([])
    engine = TimedEngine(COSTS)
    with pytest.raises(ConfigurationError, match="repeats=0"):
        measure(engine, [], repeats=0, limit_s=1.0, clock=lambda: 0.0, on_round=lambda done: None)
