"""KV as it is spoken of on the wire: token range times layer range times head range. Block sizes need not match."""

import enum

import msgspec

from disagg.core.formats import KvWire

ALL_HEADS = 1 << 30  # cut to what a layout has


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Tokens [token_start, token_stop) of layers [layer_start, layer_stop) and kv heads, keys and values."""

    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int
    head_start: int = 0
    head_stop: int = ALL_HEADS

    @property
    def num_tokens(self) -> int:
        return self.token_stop - self.token_start

    @property
    def num_layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def is_empty(self) -> bool:
        return self.num_tokens <= 0 or self.num_layers <= 0 or self.num_heads <= 0

    def intersection(self, other: "Span") -> "Span":
        """What both cover; empty when they do not meet."""
        return Span(
            max(self.token_start, other.token_start),
            min(self.token_stop, other.token_stop),
            max(self.layer_start, other.layer_start),
            min(self.layer_stop, other.layer_stop),
            max(self.head_start, other.head_start),
            min(self.head_stop, other.head_stop),
        )


class KvOrder(enum.StrEnum):
    """Orders of an arena's dimensions, outermost first. A row is one token's `dim` numbers of one head."""

    PLANES = "layer,kv,block,token,head,dim"
    BLOCKS = "layer,block,kv,token,head,dim"
    HEADS = "layer,kv,block,head,token,dim"


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """Shape of one worker's KV. Sizes are those of all its ranks together.

    A worker of several ranks keeps one arena per rank: rank = layer shard * head_shards + head shard. All of them use
    the same block ids; rank_layout() is the shape of one arena.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    block_size: int  # tokens
    order: str = KvOrder.PLANES.value  # a str: a tag that this release does not know must be named when it is refused
    head_shards: int = 1
    layer_shards: int = 1
    is_latent: bool = False  # one compressed row per token that serves as keys and values

    @property
    def num_planes(self) -> int:
        """Keys and values, or the one latent."""
        return 1 if self.is_latent else 2

    @property
    def num_ranks(self) -> int:
        return self.head_shards * self.layer_shards

    @property
    def is_head_major(self) -> bool:
        """Whether one head's tokens lie together in a block, not one token's heads."""
        return self.order == KvOrder.HEADS.value

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's keys (or values) of one token in one layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""
        return self.block_size * self.token_bytes

    def wire_row_bytes(self, wire: KvWire) -> int:
        """Bytes of a row on the way to an arena of this layout."""
        return self.row_bytes if wire is KvWire.NATIVE else self.head_dim + SCALE_BYTES

    def clipped(self, span: Span) -> Span:
        """The span within this layout's heads."""
        return msgspec.structs.replace(span, head_stop=min(span.head_stop, self.num_kv_heads))

    def span_rows(self, span: Span) -> int:
        """Rows of a span."""
        return self.num_planes * span.num_layers * span.num_tokens * self.clipped(span).num_heads

    def span_bytes(self, span: Span, wire: KvWire = KvWire.NATIVE) -> int:
        """Bytes that a span takes on the wire to an arena of this layout."""
        return self.span_rows(span) * self.wire_row_bytes(wire)

    def arena_bytes(self, num_blocks: int) -> int:
        """Bytes of all ranks' arenas together."""
        return self.num_planes * self.num_layers * num_blocks * self.block_bytes

    def rank_layout(self, rank: int) -> "KvLayout":
        """One rank's own arena, as if it were a worker of its own."""
        if self.num_ranks == 1:
            return self
        part = self.rank_span(rank)
        return msgspec.structs.replace(
            self, num_layers=part.num_layers, num_kv_heads=part.num_heads, head_shards=1, layer_shards=1
        )

    def rank_span(self, rank: int) -> Span:
        """The layers and heads that a rank keeps, of all tokens."""
        layer_shard, head_shard = divmod(rank, self.head_shards)
        layers, heads = self.num_layers // self.layer_shards, self.num_kv_heads // self.head_shards
        first_layer, first_head = layer_shard * layers, head_shard * heads
        return Span(0, MAX_TOKENS, first_layer, first_layer + layers, first_head, first_head + heads)


DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
SCALE_BYTES = 4  # float32, before each row of a compressed wire
MAX_TOKENS = 1 << 62
