"""The KV arena: one tensor [layer, K/V, block, token, kv head, head dim] and its bytes, as a transport sees them.

offset of a token = ((layer * 2 + kv) * num_blocks + block) * block_bytes + token * token_bytes
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.spans import KvLayout, KvOrder
from disagg.engine.sealed_memory import SealedMemory, is_sealable
from disagg.kvcache.memory import Landing, Segment

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
KEYS, VALUES = 0, 1


def max_blocks_for(layout: KvLayout, num_bytes: int) -> int:
    """How many blocks fit a budget. Raises ConfigurationError if not even one does."""
    per_block = layout.arena_bytes(1)
    if num_bytes < per_block:
        raise ConfigurationError(
            f"a KV arena of {num_bytes} bytes holds no block; one of {layout.block_size} tokens takes {per_block} bytes"
            "; give at least that with --kv-memory"
        )
    return num_bytes // per_block


class KvArena:
    """Keys and values of all blocks. Implements `disagg.kvcache.memory.MappableMemory`.

    In host memory, transports read and write the arena itself, also from other processes. Elsewhere (or if `is_staged`)
    bytes go through host buffers: gather copies them out, commit() copies them in.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: str = "cpu", is_staged: bool | None = None) -> None:
        if num_blocks < 1:
            raise ConfigurationError(f"num_blocks={num_blocks}: a KV arena needs at least 1 block")
        if layout.order != KvOrder.PLANES.value or layout.is_latent or layout.num_ranks > 1:
            raise InternalFault(f"{layout} is not what attention reads here: whole heads in order {KvOrder.PLANES}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.is_staged = device != "cpu" if is_staged is None else is_staged
        num_bytes = layout.arena_bytes(num_blocks)
        self._sealed = SealedMemory(num_bytes) if device == "cpu" and is_sealable() else None
        if self._sealed is not None:
            self._bytes = torch.from_numpy(self._sealed.array)
        elif device == "cpu":
            # calloc: the kernel gives zero pages at first touch, so a big arena costs nothing at start.
            self._bytes = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.tensor = self._bytes.view(TORCH_DTYPES[layout.dtype]).view(shape)
        self._view = None if self.is_staged else _bytes_of(self._bytes)
        by_slot = self.tensor.view(layout.num_layers, 2, self.num_slots, layout.num_kv_heads, layout.head_dim)
        self._by_slot = [(layer[KEYS], layer[VALUES]) for layer in by_slot]
        self._by_row = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._by_slot]

    @property
    def data(self) -> Tensor:
        """Its bytes [num_bytes], uint8, on its device."""
        return self._bytes

    @property
    def num_slots(self) -> int:
        """Token places of one layer."""
        return self.num_blocks * self.layout.block_size

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def descriptor(self) -> int | None:
        """Of the file in memory that other processes may map; None where bytes must go through host buffers."""
        return None if self._sealed is None or self.is_staged else self._sealed.descriptor

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [M, num_kv_heads, head_dim] into slots [M]; slot = block * block_size + token."""
        key_slots, value_slots = self._by_slot[layer]
        key_slots.index_copy_(0, slots, keys.to(key_slots.dtype))
        value_slots.index_copy_(0, slots, values.to(value_slots.dtype))

    def by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as [num_slots, num_kv_heads, head_dim]."""
        return self._by_slot[layer]

    def head_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as [num_slots * num_kv_heads, head_dim]; row = slot * num_kv_heads + head."""
        return self._by_row[layer]

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Readable views, in order; copies where the arena is not host memory. Raises InternalFault past the end."""
        self._check(segments)
        if self._view is not None:
            return [self._view[offset : offset + length] for offset, length in segments]
        views = self._host_buffers(segments)
        for (offset, length), host in zip(segments, views, strict=True):
            host.copy_(self._bytes[offset : offset + length])
        return [_bytes_of(host) for host in views]

    def landing(self, segments: Sequence[Segment]) -> Landing:
        """Where bytes for these segments go. Raises InternalFault past the end."""
        self._check(segments)
        if self._view is not None:
            return DirectLanding(self.gather(segments))
        return StagedLanding(
            self._host_buffers(segments), [self._bytes[offset : offset + length] for offset, length in segments]
        )

    def _host_buffers(self, segments: Sequence[Segment]) -> list[Tensor]:
        total = sum(length for _, length in segments)
        host = torch.empty(total, dtype=torch.uint8, pin_memory=self._bytes.is_cuda)
        return list(torch.split(host, [length for _, length in segments]))

    def _check(self, segments: Sequence[Segment]) -> None:
        for offset, length in segments:
            if offset < 0 or length < 0 or offset + length > self.num_bytes:
                raise InternalFault(f"segment {offset}+{length} leaves the KV arena of {self.num_bytes} bytes")

    def check_invariants(self) -> None:
        """The tensor, its byte view and the layout agree on every size."""
        if self.num_bytes != self.layout.arena_bytes(self.num_blocks):
            raise InternalFault(f"KV arena has {self.num_bytes} bytes, its layout says otherwise: {self.layout}")
        if self.tensor.data_ptr() != self._bytes.data_ptr() or not self.tensor.is_contiguous():
            raise InternalFault("the KV arena's tensor is not a view of its bytes")
        if self.tensor.stride(2) * self.tensor.element_size() != self.layout.block_bytes:
            raise InternalFault(f"a block of the KV arena is not {self.layout.block_bytes} bytes long")
        if self._sealed is not None:
            self._sealed.check_invariants()


def _bytes_of(host: Tensor) -> memoryview:
    """The tensor's own bytes, writable. host [n] is uint8 in host memory."""
    array: npt.NDArray[np.uint8] = host.numpy()
    return array.data


class DirectLanding:
    """Bytes land in the arena itself. Nobody reads these blocks before they are complete."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self._buffers = buffers

    @property
    def buffers(self) -> list[memoryview]:
        return self._buffers

    def commit(self) -> None:
        """The bytes are in place already."""


class StagedLanding:
    """Bytes land in host memory and go to the device on commit()."""

    def __init__(self, hosts: list[Tensor], targets: list[Tensor]) -> None:
        self._hosts = hosts
        self._targets = targets

    @property
    def buffers(self) -> list[memoryview]:
        return [_bytes_of(host) for host in self._hosts]

    def commit(self) -> None:
        for host, target in zip(self._hosts, self._targets, strict=True):
            target.copy_(host)
