"""Can two workers exchange KV? Answered once, when they meet, naming both values where they differ."""

from collections.abc import Callable

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import Failure, FailureKind
from disagg.core.roles import Numerics, Role
from disagg.core.spans import DTYPE_BYTES
from disagg.protocol.messages import WorkerCard

# Pairs of roles between which prompts are handed off, prefill side first.
HANDOFF_ROLES: frozenset[tuple[Role, Role]] = frozenset({(Role.PREFILL, Role.DECODE)})

# What must be equal, by the words of an error message.
_EQUAL: tuple[tuple[str, Callable[[WorkerCard], object]], ...] = (
    ("model digest", lambda card: card.pool.model_digest),
    ("tokenizer digest", lambda card: card.pool.tokenizer_digest),
    ("numerics", lambda card: card.pool.numerics.value),
    ("arithmetic", lambda card: card.pool.arithmetic if card.pool.numerics is Numerics.EXACT else None),
    ("vocabulary size", lambda card: card.pool.vocab_size),
    ("KV dtype", lambda card: card.layout.dtype),
    ("number of layers", lambda card: card.layout.num_layers),
    ("number of kv heads", lambda card: card.layout.num_kv_heads),
    ("head dim", lambda card: card.layout.head_dim),
    ("KV order", lambda card: card.layout.order),
)
_ADVICE = {
    "arithmetic": "; use the same --weights, and --kernels portable if one CPU only has AMX; or --numerics bounded"
}


def card_flaw(card: WorkerCard) -> str:
    """What makes a card unusable by itself; "" when it can be worked with. Peers are other programs."""
    layout = card.layout
    counts = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, card.num_blocks)
    if min(counts) < 1 or card.pool.max_context < 1 or card.pool.vocab_size < 1:
        return f"a size below 1 in {layout}, {card.num_blocks} blocks, {card.pool}"
    if layout.dtype not in DTYPE_BYTES:
        return f"KV dtype {layout.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
    return ""


def pairing_failure(one: WorkerCard, other: WorkerCard) -> Failure | None:
    """None when the two can exchange KV. Block sizes may differ: spans are re-cut."""
    for card in (one, other):
        flaw = card_flaw(card)
        if flaw:
            return Failure(FailureKind.INVALID_REQUEST, f"{card.worker_id} cannot be paired: {flaw}")
    for what, value in _EQUAL:
        if value(one) != value(other):
            return _refused(one, other, what, value(one), value(other), _ADVICE.get(what, ""))
    if one.protocol_max < other.protocol_min or other.protocol_max < one.protocol_min:
        mine, theirs = (f"{card.protocol_min}..{card.protocol_max}" for card in (one, other))
        return _refused(one, other, "protocol range", mine, theirs)
    if common_endpoint(one, other) is None:
        mine, theirs = (",".join(sorted(end.kind for end in card.data_endpoints)) for card in (one, other))
        return _refused(one, other, "transports offered", mine, theirs)
    return None


def common_endpoint(source: WorkerCard, destination: WorkerCard) -> Endpoint | None:
    """The destination's endpoint over the best transport that both offer."""
    offered = {endpoint.kind for endpoint in source.data_endpoints}
    common = [endpoint for endpoint in destination.data_endpoints if endpoint.kind in offered]
    order = list(TransportKind)
    return max(common, key=lambda endpoint: order.index(endpoint.kind), default=None)


def is_handoff_pair(source: WorkerCard, destination: WorkerCard) -> bool:
    """Whether the router would hand prompts from one to the other, if they can be paired at all."""
    return (source.role, destination.role) in HANDOFF_ROLES and source.pool.model == destination.pool.model


def _refused(one: WorkerCard, other: WorkerCard, what: str, mine: object, theirs: object, advice: str = "") -> Failure:
    return Failure(
        FailureKind.INVALID_REQUEST,
        f"{one.worker_id} and {other.worker_id} cannot be paired: {what} {mine} is not {theirs}{advice}",
    )
