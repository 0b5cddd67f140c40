"""What the router is told of one sequence when this worker has read its prompt."""

from disagg.protocol.messages import PromptReport
from disagg.scheduler.sequence import Sequence


def prompt_report(sequence: Sequence, now_s: float) -> PromptReport:
    """Its prompt is computed, and where KV goes to a peer all of it has been pushed."""
    source = sequence.source
    return PromptReport(
        attempt_id=sequence.attempt_id,
        num_cached_tokens=sequence.num_cached,
        num_computed_tokens=sequence.num_to_read - sequence.num_cached,
        handoff_bytes=source.pushed_bytes if source else 0,
        hidden_bytes=source.hidden_bytes if source else 0,
        hidden_s=source.pushing_s(now_s) if source else 0.0,
    )
