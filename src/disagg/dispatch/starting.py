"""What follows from a placement: room is claimed, workers are told, one of them has read the prompt."""

from collections.abc import Callable

from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId, WorkerId
from disagg.core.roles import Task
from disagg.dispatch.open_request import Choice
from disagg.dispatch.registry import Registry
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.routing import FALLBACKS, Placement, PlacementReason
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import EmitTokens, PromptReport, StageReport, StartSequence
from disagg.protocol.pairing import common_kinds
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import MOVED_TOKENS
from disagg.telemetry.track import Trip


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


def start_messages(registry: Registry, choice: Choice, now_s: float) -> list[tuple[WorkerId, StartSequence]]:
    """Decode hears first, so that it expects the hand-off when prefill asks."""
    placement, spec, attempt, emitted = _placement(choice), choice.entry.spec, choice.attempt, choice.emitted_ids
    is_timed = choice.track is not None
    decode = registry.known(placement.decode).card
    source = None if placement.prefill is None else registry.known(placement.prefill)
    if choice.track is not None:
        choice.track.place(_trip(attempt, placement, decode, source), now_s)
    if source is None:
        return [(decode.worker_id, StartSequence(spec, Task.WHOLE, attempt, emitted, is_timed=is_timed))]
    prefill = source.card
    choice.read_by = prefill.worker_id
    return [
        (
            worker.worker_id,
            StartSequence(spec, task, attempt, emitted, peer.worker_id, peer.incarnation, is_timed=is_timed),
        )
        for worker, peer, task in ((decode, prefill, Task.DECODE), (prefill, decode, Task.PREFILL))
    ]


def _trip(attempt: int, placement: Placement, decode: WorkerCard, source: WorkerRecord | None) -> Trip:
    return Trip(
        attempt=attempt,
        path=placement.path.value,
        reason=placement.reason.value,
        is_fallback=placement.reason in FALLBACKS,
        decode=placement.decode,
        prefill=placement.prefill,
        transport=_transport(source, decode) if source is not None else "",
    )


def _transport(source: WorkerRecord, decode: WorkerCard) -> str:
    """What the source says that it takes; before it has said so, what it must take, "" where there is a choice."""
    for link in source.state.links:
        if link.peer == decode.worker_id and link.transport:
            return link.transport
    kinds = common_kinds(source.card, decode)
    return kinds[0].value if len(kinds) == 1 else ""


def note_reports(
    message: EmitTokens,
    record: WorkerRecord,
    choice_of: Callable[[SequenceId], Choice | None],
    counters: Counters,
) -> None:
    """Of a worker's message, before its tokens are taken: reports are about them."""
    for prompt in message.prompts:
        choice = choice_of(prompt.attempt_id.sequence_id)
        if choice is not None:
            _note_prompt(prompt, record, choice, counters)
    for report in message.stages:
        choice = choice_of(report.attempt_id.sequence_id)
        if choice is not None:
            _note_stages(report, record.card.worker_id, choice)


def _note_prompt(report: PromptReport, record: WorkerRecord, choice: Choice, counters: Counters) -> None:
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
    if choice.track is not None:
        sent = report.handoff_bytes, report.hidden_bytes, report.hidden_s
        choice.track.read_prompt(report.num_cached_tokens, *sent)


def _note_stages(report: StageReport, worker_id: WorkerId, choice: Choice) -> None:
    """Believed of the same workers as their tokens; also of an earlier attempt, whose late token may still count."""
    if choice.track is not None and choice.is_open and worker_id in choice.workers:
        choice.track.report(report.attempt_id.attempt, worker_id, report.position, report.stages)


def _placement(choice: Choice) -> Placement:
    if choice.placement is None:
        raise InternalFault(f"{choice.sequence_id} is placed nowhere")
    return choice.placement
