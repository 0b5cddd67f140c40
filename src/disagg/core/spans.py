"""KV as it is spoken of on the wire: a token range times a layer range. Block sizes need not match."""

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Tokens [token_start, token_stop) of layers [layer_start, layer_stop), keys and values."""

    token_start: int
    token_stop: int
    layer_start: int
    layer_stop: int

    @property
    def num_tokens(self) -> int:
        return self.token_stop - self.token_start

    @property
    def num_layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def is_empty(self) -> bool:
        return self.num_tokens <= 0 or self.num_layers <= 0


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """Shape of one worker's KV arena: [layer, K/V, block, token in block, kv head, head dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32", "float16", "bfloat16"
    block_size: int  # tokens
    order: str = "layer,kv,block,token,head,dim"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys (or values) in one layer."""
        return self.block_size * self.token_bytes

    def span_bytes(self, span: Span) -> int:
        """Bytes that a span takes on a native wire."""
        return 2 * span.num_layers * span.num_tokens * self.token_bytes

    def arena_bytes(self, num_blocks: int) -> int:
        return 2 * self.num_layers * num_blocks * self.block_bytes


DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
