"""What goes into one step: every running stream's next token, and prompt chunks within a budget of tokens or time.

Chunked prefill beside decode follows Sarathi-Serve (Agrawal et al., OSDI 2024): running streams go first, prompts
fill what is left, so that no stream waits for a whole prompt. How much is left is what the step's predicted time leaves
of the streams' target; a worker that has not learned its step times yet, or has no target, takes a fixed number.

Which prompt is next, the first difference deciding:

  1. the higher priority
  2. one whose answer has begun (it was preempted, or comes from another worker): a client sees it stand still
  3. one of the tenant that has had least (`policy/fairness.py`)
  4. the least of: predicted seconds to compute what is left of it, less AGEING x seconds waited

Tokens found in the prefix index need no computing, so hits go first. Ageing bounds every wait: a prompt that takes R
seconds is overtaken by none of its tenant that comes more than R / AGEING seconds after it.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from disagg.core.ids import SequenceId
from disagg.policy.step_time import StepCosts, StepShape

AGEING = 0.25  # seconds of computing that a second of waiting is worth
STREAM_SLOWDOWN = 1.5  # what prompts may make of a step that is over its target without them


class StepBudget(msgspec.Struct, frozen=True):
    """Limits of one step, in tokens and rows."""

    chunk_tokens: int  # most prompt tokens of any step
    mixed_chunk_tokens: int  # prompt tokens beside running streams, while there is no target or nothing learned
    max_running: int  # sequences that may hold blocks here at once
    itl_target_s: float = 0.0  # prompts beside streams fill steps up to this; 0: mixed_chunk_tokens, always
    prompts_alone: bool = False  # streams stand still while prompts are read, as before chunked prefill: a baseline


class PromptWork(msgspec.Struct, frozen=True):
    """A sequence whose prompt is not computed yet."""

    sequence_id: SequenceId
    num_remaining_tokens: int
    position: int = 0  # of the first of them; tokens before it are computed or expected in the prefix index
    priority: int = 0
    is_begun: bool = False  # tokens of its answer are known already
    tenant: str = ""
    arrived_s: float = 0.0
    arrival: int = 0  # n-th of this worker


class Chunk(msgspec.Struct, frozen=True):
    """Prompt tokens of one sequence in one step."""

    sequence_id: SequenceId
    num_tokens: int


_Entry = tuple[float, int, int, PromptWork]


def order_prompts(
    work: Iterable[PromptWork], now_s: float, *, costs: StepCosts, services: Mapping[str, float]
) -> Iterator[PromptWork]:
    """The order in which prompts are to run; lazily, since few of many fit into a step.

    services: tokens that each tenant has had. A tenant is charged for what is yielded, as if it ran at once.
    """
    classes: dict[tuple[int, bool], dict[str, list[_Entry]]] = {}
    token_s, pair_s = costs.prompt_token_s, costs.prompt_pair_s
    for index, item in enumerate(work):  # many may wait, at every step: StepCosts.chunk_s, written out
        num, position = item.num_remaining_tokens, item.position
        rank = token_s * num + pair_s * (num * position + num * (num + 1) // 2) - AGEING * (now_s - item.arrived_s)
        tenants = classes.setdefault((-item.priority, not item.is_begun), {})
        tenants.setdefault(item.tenant, []).append((rank, item.arrival, index, item))
    for _, tenants in sorted(classes.items()):
        yield from _take_turns(tenants, services)


def _take_turns(tenants: dict[str, list[_Entry]], services: Mapping[str, float]) -> Iterator[PromptWork]:
    turns: list[tuple[float, _Entry, str]] = []
    for tenant, entries in tenants.items():
        heapq.heapify(entries)
        turns.append((services.get(tenant, 0.0), heapq.heappop(entries), tenant))
    heapq.heapify(turns)
    while turns:
        service, (*_, item), tenant = turns[0]
        yield item
        if tenants[tenant]:
            heapq.heapreplace(turns, (service + item.num_remaining_tokens, heapq.heappop(tenants[tenant]), tenant))
        else:
            heapq.heappop(turns)


def itl_target_s(streams: StepShape, budget: StepBudget, costs: StepCosts) -> float:
    """What a step with these streams may take: the target, or a little more than the streams take alone."""
    return max(budget.itl_target_s, STREAM_SLOWDOWN * costs.predict(streams))


def plan_chunks(
    work: Iterable[PromptWork],
    *,
    streams: StepShape,
    budget: StepBudget,
    costs: StepCosts | None = None,
    min_tokens: int = 1,
) -> tuple[Chunk, ...]:
    """Fill the step in the given order; the last prompt may get a part of what it needs.

    streams: the step without prompts. costs: what was learned of this worker's steps, None: not enough. min_tokens: a
    step takes as many prompt tokens, if there are any, whatever it costs: prompts must get on.
    """
    is_timed = streams.num_streams > 0 and budget.itl_target_s > 0
    if costs is None or not is_timed:
        room = budget.mixed_chunk_tokens if streams.num_streams else budget.chunk_tokens
        return tuple(_fill(work, room))
    seconds = itl_target_s(streams, budget, costs) - costs.predict(streams)
    return tuple(_fill_time(work, budget.chunk_tokens, seconds, costs, min_tokens))


def _fill(work: Iterable[PromptWork], room: int) -> Iterator[Chunk]:
    for item in work:
        if room <= 0:
            return
        num_tokens = min(item.num_remaining_tokens, room)
        yield Chunk(item.sequence_id, num_tokens)
        room -= num_tokens


def _fill_time(
    work: Iterable[PromptWork], room: int, seconds: float, costs: StepCosts, min_tokens: int
) -> Iterator[Chunk]:
    for item in work:
        num_wanted = min(item.num_remaining_tokens, room)
        num_tokens = max(costs.tokens_within(seconds, item.position, num_wanted), min(min_tokens, num_wanted))
        if num_tokens <= 0:
            return
        yield Chunk(item.sequence_id, num_tokens)
        room -= num_tokens
        min_tokens -= num_tokens
        seconds -= costs.chunk_s(item.position, num_tokens)
