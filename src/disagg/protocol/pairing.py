"""Can two workers exchange KV? Answered once, when they meet, naming both values where they differ."""

from collections.abc import Callable

from disagg.core.endpoints import COMMITS_LANDINGS, Endpoint, TransportKind, is_dialable
from disagg.core.errors import Failure, FailureKind
from disagg.core.formats import KvWire
from disagg.core.ids import RANK_MARK
from disagg.core.roles import Numerics, Role
from disagg.core.spans import DTYPE_BYTES, KvLayout, KvOrder
from disagg.protocol.cards import WorkerCard

# Pairs of roles between which prompts are handed off, prefill side first.
HANDOFF_ROLES: frozenset[tuple[Role, Role]] = frozenset({(Role.PREFILL, Role.DECODE)})

# Bounds of what is kept of a card: its sender may be anything.
MAX_TEXT_CHARS = 1024
MAX_ENDPOINTS = 64
MAX_TOKEN_BYTES = 256
MAX_COUNT = 2**40

# What must be equal, by the words of an error message.
_EQUAL: tuple[tuple[str, Callable[[WorkerCard], object]], ...] = (
    ("model digest", lambda card: card.pool.model_digest),
    ("tokenizer digest", lambda card: card.pool.tokenizer_digest),
    ("numerics", lambda card: card.pool.numerics.value),
    ("arithmetic", lambda card: card.pool.arithmetic if card.pool.numerics is Numerics.EXACT else None),
    ("vocabulary size", lambda card: card.pool.vocab_size),
    ("KV dtype", lambda card: card.layout.dtype if card.pool.numerics is Numerics.EXACT else None),
    ("KV wire", lambda card: card.kv_wire.value),
    ("number of layers", lambda card: card.layout.num_layers),
    ("number of kv heads", lambda card: card.layout.num_kv_heads),
    ("head dim", lambda card: card.layout.head_dim),
    ("latent KV", lambda card: card.layout.is_latent),
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
    texts = (card.worker_id, card.pool.model, card.pool.model_digest, card.pool.tokenizer_digest, card.control_address)
    longest = max(len(text) for text in (*texts, card.pool.arithmetic, *(end.address for end in card.data_endpoints)))
    if longest > MAX_TEXT_CHARS or len(card.data_endpoints) > MAX_ENDPOINTS:
        return f"a text of {longest} characters or {len(card.data_endpoints)} endpoints: more than any worker says"
    if any(len(end.token) > MAX_TOKEN_BYTES for end in card.data_endpoints):
        return f"a token of more than {MAX_TOKEN_BYTES} bytes"
    for end in card.data_endpoints:
        if end.kind is TransportKind.TCP and not is_dialable(end.address):
            return f"{end.address!r} for KV over tcp, which is no host:port"
    if max(counts) > MAX_COUNT or card.protocol_min > card.protocol_max:
        return f"a size above {MAX_COUNT} in {layout}, or a protocol range of {card.protocols}"
    if RANK_MARK in card.worker_id:
        return f"a name with {RANK_MARK!r} in it, which marks the ranks of a worker"
    if card.kv_wire is not KvWire.NATIVE and card.pool.numerics is Numerics.EXACT:
        return f"KV wire {card.kv_wire.value} loses bits, which {card.pool.numerics.value} numerics do not allow"
    return layout_flaw(layout)


def layout_flaw(layout: KvLayout) -> str:
    """What makes a layout of positive sizes contradict itself; "" for nothing."""
    if layout.dtype not in DTYPE_BYTES:
        return f"KV dtype {layout.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
    if layout.is_latent and layout.num_kv_heads != 1:
        return f"latent KV has 1 row per token, not {layout.num_kv_heads} kv heads"
    for what, whole, shards in (
        ("kv heads", layout.num_kv_heads, layout.head_shards),
        ("layers", layout.num_layers, layout.layer_shards),
    ):
        if shards < 1 or whole % shards:
            return f"{whole} {what} cannot be kept by {shards} shards of equal size"
    return ""


def pairing_failure(one: WorkerCard, other: WorkerCard) -> Failure | None:
    """None when the two can exchange KV. Block sizes, orders and shards may differ: spans are converted on the way."""
    for card in (one, other):
        flaw = card_flaw(card)
        if flaw:
            return Failure(FailureKind.INVALID_REQUEST, f"{card.worker_id} cannot be paired: {flaw}")
    if not one.protocols.meets(other.protocols):
        return _refused(one, other, "protocol range", one.protocols, other.protocols)
    for what, value in _EQUAL:
        if value(one) != value(other):
            return _refused(one, other, what, value(one), value(other), _ADVICE.get(what, ""))
    orders = [card.layout.order for card in (one, other)]
    if not {*orders} <= {order.value for order in KvOrder}:  # even two that are equal: nothing is guessed
        return _refused(one, other, "KV order", orders[0], orders[1], f"; known are {', '.join(KvOrder)}")
    if not common_kinds(one, other) or not common_kinds(other, one):
        mine, theirs = (_offer(card) for card in (one, other))
        return _refused(one, other, "transports offered", mine, theirs)
    return None


def common_kinds(source: WorkerCard, destination: WorkerCard) -> tuple[TransportKind, ...]:
    """Transports that all ranks of both offer, in order of TransportKind; or none."""
    return tuple(kind for kind in TransportKind if endpoints_over(source, destination, kind))


def endpoints_over(source: WorkerCard, destination: WorkerCard, kind: TransportKind) -> tuple[Endpoint, ...]:
    """The destination's endpoints of one kind, one per rank; or none where some rank of either cannot use it."""
    if destination.kv_wire is not KvWire.NATIVE and kind not in COMMITS_LANDINGS:
        return ()
    own = [each for each in source.data_endpoints if each.kind is kind]
    theirs = {each.rank: each for each in destination.data_endpoints if any(each.is_same_way(other) for other in own)}
    mine = {each.rank for each in own}
    is_whole = mine == {*range(source.layout.num_ranks)} and theirs.keys() == {*range(destination.layout.num_ranks)}
    return tuple(theirs[rank] for rank in sorted(theirs)) if is_whole else ()


def _offer(card: WorkerCard) -> str:
    kinds = ",".join(sorted({each.kind for each in card.data_endpoints}))
    return (
        kinds
        if card.layout.num_ranks == 1
        else f"{kinds} at {len(card.data_endpoints)} of {card.layout.num_ranks} ranks"
    )


def is_handoff_pair(source: WorkerCard, destination: WorkerCard) -> bool:
    """Whether the router would hand prompts from one to the other, if they can be paired at all."""
    return (source.role, destination.role) in HANDOFF_ROLES and source.pool.model == destination.pool.model


def _refused(one: WorkerCard, other: WorkerCard, what: str, mine: object, theirs: object, advice: str = "") -> Failure:
    return Failure(
        FailureKind.INVALID_REQUEST,
        f"{one.worker_id} and {other.worker_id} cannot be paired: {what} {mine} is not {theirs}{advice}",
    )
