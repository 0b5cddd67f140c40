"""What goes into one step: every running stream's next token, and prompt chunks within a token budget.

Chunked prefill beside decode follows Sarathi-Serve (Agrawal et al., OSDI 2024): running streams go first, prompts
fill what is left, so that no stream waits for a whole prompt.
"""

from collections.abc import Iterable

import msgspec

from disagg.core.ids import SequenceId


class StepBudget(msgspec.Struct, frozen=True):
    """Limits of one step, in tokens and rows."""

    chunk_tokens: int  # prompt tokens of a step without running streams
    mixed_chunk_tokens: int  # prompt tokens beside running streams: what their inter-token latency can bear
    max_running: int  # sequences that may hold blocks here at once


class PromptWork(msgspec.Struct, frozen=True):
    """A sequence whose prompt is not computed yet, in the order in which it should run."""

    sequence_id: SequenceId
    num_remaining_tokens: int


class Chunk(msgspec.Struct, frozen=True):
    """Prompt tokens of one sequence in one step."""

    sequence_id: SequenceId
    num_tokens: int


def plan_chunks(work: Iterable[PromptWork], *, num_streams: int, budget: StepBudget) -> tuple[Chunk, ...]:
    """Fill the step's prompt budget in the given order; the last prompt may get a part of what it needs."""
    room = budget.mixed_chunk_tokens if num_streams else budget.chunk_tokens
    chunks: list[Chunk] = []
    for item in work:
        if room <= 0:
            break
        num_tokens = min(item.num_remaining_tokens, room)
        chunks.append(Chunk(item.sequence_id, num_tokens))
        room -= num_tokens
    return tuple(chunks)
