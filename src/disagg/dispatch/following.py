"""Choices of one request share its prompt: one of them has it read and handed over, the others wait for it.

  1. The first choice is placed like any sequence; it leads. The others follow: they wait; room is claimed for all.
  2. It moves when its workers fail, and they go on waiting for it, wherever it goes.
  3. A token of it that comes from the worker that writes says that the prompt is there, and indexed. The followers
     start there: they hold the leader's full blocks, and read the rest, less than a block, into blocks of their own.
  4. From then on each choice moves by itself. If the leader ends earlier, the others wait no longer than the prompt
     needs to arrive; then the next of them leads.

A pair whose hand-off loses something of the KV is not for this: its received blocks answer no prompt read natively.
"""

from disagg.core.roles import Role
from disagg.dispatch.open_request import Choice, OpenRequest
from disagg.dispatch.registry import Registry
from disagg.dispatch.worker_record import WorkerRecord
from disagg.kvcache.conversion import lossy_form
from disagg.policy.routing import NoPlacement, Path, Placement, PlacementReason, can_follow, num_shared_tokens


def find_leader(
    registry: Registry, opened: OpenRequest, choice: Choice, alone: Placement | NoPlacement
) -> Choice | None:
    """An earlier choice whose prompt this one is to wait for. alone: where it would go by itself."""
    if not choice.sequence_id.choice or choice.attempt or isinstance(alone, NoPlacement):
        return None
    views = {view.worker_id: view for view in registry.views(opened.model)}
    leaders = [
        each
        for each in opened.choices[: choice.sequence_id.choice]
        if each.is_placed
        and (view := views.get(each.workers[0])) is not None
        and can_follow(view, choice.demand(), alone)
        and can_share(registry, each)
    ]
    return min(leaders, key=lambda each: (each.workers[0] != alone.decode, each.sequence_id.choice), default=None)


def can_share(registry: Registry, leader: Choice) -> bool:
    """Whether blocks that a placed choice has brought to its writer answer a prompt that is read there."""
    placement = leader.placement
    if placement is None:
        return False
    decode = registry.known(placement.decode).card
    if num_shared_tokens(leader.demand().num_prompt_tokens, decode.layout.block_size) == 0:
        return False
    if placement.prefill is None:
        return True
    prefill = registry.get(placement.prefill)
    return prefill is not None and not lossy_form(prefill.card.layout, decode.layout, prefill.card.kv_wire)


def part_unless_shared(registry: Registry, leader: Choice, now_s: float) -> None:
    """A leader has just been placed, perhaps where nothing can be shared: then nobody waits for it any more."""
    if leader.followers and not can_share(registry, leader):
        for follower in tuple(leader.followers):
            follower.unfollow(now_s)


def shared_placement(writer: WorkerRecord, follower: Choice) -> Placement:
    """Where the prompt is; of what it will find there it is told too."""
    card = writer.card
    follower.kept_on = card.worker_id
    follower.num_kept_tokens = num_shared_tokens(len(follower.entry.spec.prompt_ids), card.layout.block_size)
    path = Path.MIXED if card.role is Role.MIXED else Path.LOCAL
    return Placement(path, PlacementReason.SHARED_PROMPT, card.worker_id)
