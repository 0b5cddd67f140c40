"""Which workers serve a sequence, and on which path.

The decode side is chosen first: it must hold the whole answer. Then the path: a mixed worker, or a decode worker that
reads a short prompt itself, or a prefill worker that hands the KV over. Views are hints; the worker's answer decides.
"""

import enum
from collections.abc import Callable, Sequence

import msgspec

from disagg.core.ids import WorkerId
from disagg.core.roles import Role


class Path(enum.StrEnum):
    """How the prompt gets read."""

    MIXED = "mixed"  # a mixed worker does both
    LOCAL = "local"  # the decode worker reads the prompt itself
    REMOTE = "remote"  # a prefill worker reads it and hands it over


class PlacementReason(enum.StrEnum):
    """Why this path. One metric label each."""

    MIXED_WORKER = "mixed_worker"
    SHORT_PROMPT = "short_prompt"
    LONG_PROMPT = "long_prompt"
    NO_PREFILL_WORKER = "no_prefill_worker"  # a fallback: none is there, or none is paired with the decode worker
    SHARED_PROMPT = "shared_prompt"  # another choice of its request has brought the prompt there
    PREFILL_POOL_TOO_SMALL = "prefill_pool_too_small"  # a fallback: no paired prefill worker can hold the prompt


_Load = Callable[["WorkerView"], tuple[float, int, WorkerId]]

# Reasons that are not what was intended.
FALLBACKS = frozenset({PlacementReason.NO_PREFILL_WORKER, PlacementReason.PREFILL_POOL_TOO_SMALL})


class WorkerView(msgspec.Struct, frozen=True):
    """What the router knows of one worker of the pool."""

    worker_id: WorkerId
    role: Role
    num_blocks: int
    block_size: int
    num_claimed_blocks: int  # promised to open sequences
    num_waiting_tokens: int  # prompt tokens sent there and not answered yet
    num_open: int  # sequences sent there and not ended
    partners: frozenset[WorkerId]  # workers it can hand KV to
    max_context: int = 1 << 62  # tokens

    @property
    def num_pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def can_hold(self, num_tokens: int) -> bool:
        """Of one sequence."""
        return num_tokens <= min(self.num_pool_tokens, self.max_context)


class Placement(msgspec.Struct, frozen=True):
    """The answer: who decodes, who reads the prompt, why."""

    path: Path
    reason: PlacementReason
    decode: WorkerId  # the mixed worker on the mixed path
    prefill: WorkerId | None = None


class NoPlacement(msgspec.Struct, frozen=True):
    """Nobody can serve this now; a plain sentence says what is missing."""

    missing: str


class Demand(msgspec.Struct, frozen=True):
    """What one sequence will take, in tokens, and where some of its KV may still be."""

    num_prompt_tokens: int  # to be read: prompt, and answer tokens that are known already
    num_uncached_tokens: int  # of those, not known to be cached on preferred_decode
    num_total_tokens: int  # prompt and answer
    preferred_decode: WorkerId | None = None
    preferred_prefill: WorkerId | None = None
    excluded: frozenset[WorkerId] = frozenset()  # they failed it; taken only when nobody else is there


def choose(workers: Sequence[WorkerView], demand: Demand, local_prefill_tokens: int) -> Placement | NoPlacement:
    """Place one sequence.

    local_prefill_tokens: most uncached tokens that a decode worker reads itself; 0 means never, but for the fallbacks
    that their reasons name.
    """
    taking = workers if not demand.excluded else [view for view in workers if view.worker_id not in demand.excluded]
    writers = [view for view in taking if view.role is not Role.PREFILL]
    writers = writers or [view for view in workers if view.role is not Role.PREFILL]
    if not writers:
        return NoPlacement(what_is_missing(workers))
    sources = [view for view in taking if view.role is Role.PREFILL]
    decode = _best_writer(writers, sources, demand)
    if decode.role is Role.MIXED:
        return Placement(Path.MIXED, PlacementReason.MIXED_WORKER, decode.worker_id)
    uncached = demand.num_uncached_tokens
    if decode.worker_id != demand.preferred_decode:
        uncached = demand.num_prompt_tokens
    if uncached <= local_prefill_tokens:
        return Placement(Path.LOCAL, PlacementReason.SHORT_PROMPT, decode.worker_id)
    partners = [view for view in sources if decode.worker_id in view.partners]
    prefill = _best_holding(partners, demand.num_prompt_tokens, demand.preferred_prefill, _prefill_load)
    if prefill is None:
        reason = PlacementReason.PREFILL_POOL_TOO_SMALL if partners else PlacementReason.NO_PREFILL_WORKER
        return Placement(Path.LOCAL, reason, decode.worker_id)
    return Placement(Path.REMOTE, PlacementReason.LONG_PROMPT, decode.worker_id, prefill.worker_id)


def num_shared_tokens(num_prompt_tokens: int, block_size: int) -> int:
    """Prompt tokens whose KV choices of one request can share: whole blocks, without the last token."""
    return (num_prompt_tokens - 1) // block_size * block_size


def can_follow(writer: WorkerView, demand: Demand, alone: Placement) -> bool:
    """Whether a choice is to wait for the prompt that another one of its request brings to `writer`.

    alone: where it would go by itself. It goes elsewhere when nothing would be shared, or for want of room.
    """
    if num_shared_tokens(demand.num_prompt_tokens, writer.block_size) == 0:
        return False
    num_blocks = -(-demand.num_total_tokens // writer.block_size)
    return alone.decode == writer.worker_id or writer.num_claimed_blocks + num_blocks <= writer.num_blocks


def what_is_missing(workers: Sequence[WorkerView]) -> str:
    """A plain sentence; "" when requests can be served."""
    roles = {view.role for view in workers}
    if Role.MIXED in roles or _has_pair(workers):
        return ""
    if not roles:
        return "no worker has registered"
    if Role.PREFILL not in roles:
        return "a decode worker is here, no prefill worker has registered"
    if Role.DECODE not in roles:
        return "a prefill worker is here, no decode worker has registered"
    return "prefill and decode workers are here, but no two of them have paired"


def _has_pair(workers: Sequence[WorkerView]) -> bool:
    sources = [view for view in workers if view.role is Role.PREFILL]
    return any(view.role is Role.DECODE and _is_partner(view.worker_id, sources) for view in workers)


def _best_writer(writers: Sequence[WorkerView], sources: Sequence[WorkerView], demand: Demand) -> WorkerView:
    """A decode worker without a prefill partner is second choice to anything that works as intended."""
    best = _best_holding(writers, demand.num_total_tokens, demand.preferred_decode, _decode_load)
    if best is not None and _is_whole(best, sources):  # nearly always: then it is the best of those that are, too
        return best
    whole = [view for view in writers if _is_whole(view, sources)] or writers
    best = _best_holding(whole, demand.num_total_tokens, demand.preferred_decode, _decode_load)
    return best or _best(whole, demand.preferred_decode, _decode_load)


def _is_whole(writer: WorkerView, sources: Sequence[WorkerView]) -> bool:
    """Whether prompts get there as intended."""
    return writer.role is Role.MIXED or _is_partner(writer.worker_id, sources)


def _best_holding(
    views: Sequence[WorkerView], num_tokens: int, preferred: WorkerId | None, load: _Load
) -> WorkerView | None:
    """Of those that can hold so many tokens of one sequence; None where none can."""
    if not views:
        return None
    best = _best(views, preferred, load)
    if best.can_hold(num_tokens):  # nearly always: then the others need no look
        return best
    able = [view for view in views if view.can_hold(num_tokens)]
    return _best(able, preferred, load) if able else None


def _best(views: Sequence[WorkerView], preferred: WorkerId | None, load: _Load) -> WorkerView:
    """The preferred one, else the least loaded."""
    known = [view for view in views if view.worker_id == preferred] if preferred is not None else []
    return known[0] if known else min(views, key=load)


def _is_partner(worker_id: WorkerId, sources: Sequence[WorkerView]) -> bool:
    """Whether one of the sources can hand KV to it."""
    return any(worker_id in view.partners for view in sources)


def _decode_load(view: WorkerView) -> tuple[float, int, WorkerId]:
    return view.num_claimed_blocks / view.num_blocks, view.num_open, view.worker_id


def _prefill_load(view: WorkerView) -> tuple[float, int, WorkerId]:
    return view.num_waiting_tokens, view.num_open, view.worker_id
