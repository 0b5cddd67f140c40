"""What follows from a placement: room is claimed, workers are told, one of them has read the prompt."""

from disagg.core.errors import InternalFault
from disagg.core.ids import WorkerId
from disagg.core.roles import Task
from disagg.dispatch.open_request import Choice
from disagg.dispatch.registry import Registry
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.routing import Placement, PlacementReason
from disagg.protocol.messages import PromptReport, StartSequence
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import MOVED_TOKENS


def claim(registry: Registry, choice: Choice) -> None:
    """Promise a placed choice room for its whole answer, and for those of the choices that wait for its prompt."""
    placement, spec, demand = _placement(choice), choice.entry.spec, choice.demand()
    decode = registry.known(placement.decode)
    num_blocks = -(-spec.max_total_tokens // decode.card.layout.block_size)
    is_new = spec.sequence_id not in decode.claimed_blocks
    decode.claim(spec.sequence_id, num_blocks * (1 + len(choice.followers)))
    if is_new:
        is_shared = placement.reason is PlacementReason.SHARED_PROMPT
        num_tokens = demand.num_uncached_tokens if is_shared else demand.num_prompt_tokens
        registry.known(placement.prefill or placement.decode).await_reading(spec.sequence_id, num_tokens)


def start_messages(registry: Registry, choice: Choice) -> list[tuple[WorkerId, StartSequence]]:
    """Decode hears first, so that it expects the hand-off when prefill asks."""
    placement, spec, attempt, emitted = _placement(choice), choice.entry.spec, choice.attempt, choice.emitted_ids
    if placement.prefill is None:
        return [(placement.decode, StartSequence(spec, Task.WHOLE, attempt, emitted))]
    decode, prefill = registry.known(placement.decode).card, registry.known(placement.prefill).card
    choice.read_by = prefill.worker_id
    return [
        (worker.worker_id, StartSequence(spec, task, attempt, emitted, peer.worker_id, peer.incarnation))
        for worker, peer, task in ((decode, prefill, Task.DECODE), (prefill, decode, Task.PREFILL))
    ]


def note_prompt(report: PromptReport, record: WorkerRecord, choice: Choice, counters: Counters) -> None:
    """A worker has read the prompt of a choice."""
    if choice.attempt != report.attempt_id.attempt:
        return
    was_waiting = record.note_read(choice.sequence_id)
    # What a retry or a preempted sequence finds cached is this request's own.
    if was_waiting and choice.attempt == 1:
        choice.num_cached_tokens = report.num_cached_tokens
    if choice.attempt > 1:
        counters.add(MOVED_TOKENS, report.num_cached_tokens, "cached")
        counters.add(MOVED_TOKENS, report.num_computed_tokens, "computed")


def _placement(choice: Choice) -> Placement:
    if choice.placement is None:
        raise InternalFault(f"{choice.sequence_id} is placed nowhere")
    return choice.placement
