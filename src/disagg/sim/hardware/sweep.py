"""Times steps of a live engine over a grid of shapes and fits costs to them."""

import statistics
from collections.abc import Callable, Sequence

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.policy.step_time import StepCosts
from disagg.scheduler.engine import Engine, StepPlan, StepRow
from disagg.sim.hardware.fitted import ProfileCell, learned_shape
from disagg.sim.hardware.step_model import StepShape

PROMPTS = (32, 128, 512, 1024)  # tokens computed in a step
CACHED = (0, 512, 2048)  # tokens that a prompt finds in the cache
STREAMS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 4096)  # tokens that each stream attends to
MIXED = ((128, 0, 4, 256), (256, 256, 16, 256))  # prompt, cached, streams, context
SWEEPS = 2000  # of coordinate descent; five values settle long before
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class SweepLimits(msgspec.Struct, frozen=True):
    """What the engine can hold and what may be asked of it."""

    max_context: int  # tokens of one sequence
    kv_tokens: int
    max_prompt: int = 1024  # tokens of one step
    max_streams: int = 32


def sweep_shapes(limits: SweepLimits) -> list[StepShape]:
    """Prompts by cached tokens, streams by context, and a few of both, as far as they fit."""
    prompts = [
        StepShape(prefill=((new, cached),))
        for cached in CACHED
        for new in PROMPTS
        if new <= limits.max_prompt and new + cached <= min(limits.max_context, limits.kv_tokens)
    ]
    streams = [
        StepShape(decode_contexts_sum=count * context, num_decode=count)
        for context in CONTEXTS
        for count in STREAMS
        if _holds(limits, count, context)
    ]
    mixed = [
        StepShape(((new, cached),), count * context, count)
        for new, cached, count, context in MIXED
        if new <= limits.max_prompt
        and _holds(limits, count, context)
        and new + cached + count * context <= limits.kv_tokens
        and new + cached <= limits.max_context
    ]
    return prompts + streams + mixed


def measure(
    engine: Engine,
    shapes: Sequence[StepShape],
    *,
    repeats: int,
    limit_s: float,
    clock: Callable[[], float],
    on_round: Callable[[int], None],
) -> list[tuple[StepShape, float]]:
    """Each shape with the median of its repeats, in seconds.

    All shapes take turns, so that what disturbs the machine for a while hits each of them once; the first round does
    not count. No round is begun after limit_s, but for the first that counts. on_round is told how many are done. KV is
    whatever the arena holds: times do not depend on it. Raises ConfigurationError for less than one repeat.
    """
    if repeats < 1:
        raise ConfigurationError(f"repeats={repeats} must be at least 1")
    plans = [plan_of(shape, engine.layout.block_size) for shape in shapes]
    times: list[list[float]] = [[] for _ in plans]
    started = clock()
    for done in range(repeats + 1):
        if done > 1 and clock() - started > limit_s:
            break
        for plan, taken in zip(plans, times, strict=True):
            begun = clock()
            engine.run_step(plan, _ignore)
            taken.append(clock() - begun)
        on_round(done + 1)
    return [(shape, statistics.median(taken[1:])) for shape, taken in zip(shapes, times, strict=True)]


def plan_of(shape: StepShape, block_size: int) -> StepPlan:
    """A step of this shape; every sequence has blocks of its own, streams share the context evenly."""
    each = shape.decode_contexts_sum // shape.num_decode if shape.num_decode else 0
    wanted = [(*prompt, 0) for prompt in shape.prefill] + [(1, each - 1, 1)] * shape.num_decode
    rows, used = [], 0
    for number, (new, position, output_position) in enumerate(wanted):
        num_blocks = -(-(new + position) // block_size)
        rows.append(
            StepRow(
                sequence_id=SequenceId(RequestId(Incarnation(1), number), 0),
                token_ids=tuple(1 + token % 7 for token in range(new)),
                position=position,
                block_table=tuple(BlockId(used + block) for block in range(num_blocks)),
                sampling=GREEDY,
                output_position=output_position,
            )
        )
        used += num_blocks
    return StepPlan(StepId(0), tuple(rows))


def fit_costs(measured: Sequence[tuple[StepShape, float]]) -> StepCosts:
    """Least squares of the relative errors over costs of 0 or more. Raises ConfigurationError for no measurement."""
    if not measured:
        raise ConfigurationError("nothing was measured: no step fits the engine's memory; give it more KV blocks")
    rows = [
        [value / seconds for value in (1.0, *map(float, msgspec.structs.astuple(learned_shape(shape))))]
        for shape, seconds in measured
    ]
    columns = list(zip(*rows, strict=True))
    costs = [0.0] * len(columns)
    left = [1.0] * len(rows)  # what is not explained yet, relative
    for _ in range(SWEEPS):
        for index, column in enumerate(columns):
            square = sum(value * value for value in column)
            if square == 0.0:
                continue
            wanted = costs[index] + sum(a * b for a, b in zip(column, left, strict=True)) / square
            change = max(0.0, wanted) - costs[index]
            costs[index] += change
            left = [rest - change * value for rest, value in zip(left, column, strict=True)]
    return StepCosts(*costs)


def cells_of(measured: Sequence[tuple[StepShape, float]], costs: StepCosts) -> tuple[ProfileCell, ...]:
    return tuple(ProfileCell(shape, seconds, costs.predict(learned_shape(shape))) for shape, seconds in measured)


def _holds(limits: SweepLimits, count: int, context: int) -> bool:
    return count <= limits.max_streams and context <= limits.max_context and count * context <= limits.kv_tokens


def _ignore(num_layers: int) -> None:
    """Nothing waits for a layer here."""
