"""KV that travels between unlike workers: rows gathered, cast, turned and coded.

Source       a read (kvcache.conversion.SpanRead) has an address behind the arena's end. gather() of it makes the bytes
             on the thread that sends them, into memory that lives as long as the frame: what waits is only a plan.
Destination  a compressed wire lands in host memory of one frame; commit() decodes it into the arena's rows, on the
             thread that received it and before anybody is told that it has landed.

A coded row is its scale (float32, in the machine's byte order) and one byte per number.
"""

import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.core.formats import KvWire
from disagg.core.spans import SCALE_BYTES, KvLayout
from disagg.engine.arena import TORCH_DTYPES, KvArena
from disagg.kvcache.conversion import SpanRead, landing_rows
from disagg.kvcache.memory import Landing, Memory, Segment
from disagg.kvcache.segments import row_strides

if sys.byteorder != "little":
    raise InternalFault("scales of a compressed wire are little-endian; this machine is not")

ADDRESS_STEP = 1 << 40  # bytes between the addresses of two reads: more than any span takes
MAX_READS = 1 << 20
LARGEST_CODE = 127.0


class ArenaRows:
    """One rank's arena as rows [rows, head_dim], whatever its order. `data` [bytes] is uint8, on any device."""

    def __init__(self, data: Tensor, layout: KvLayout, num_blocks: int) -> None:
        if data.numel() != layout.arena_bytes(num_blocks):
            text = f"{data.numel()} bytes for {num_blocks} blocks of {layout}"
            raise InternalFault(f"{text}, which take {layout.arena_bytes(num_blocks)}")
        self.layout, self.num_blocks = layout, num_blocks
        self._strides = row_strides(layout, num_blocks)
        self.rows = data.view(TORCH_DTYPES[layout.dtype]).view(-1, layout.head_dim)

    def gather(self, read: SpanRead) -> Tensor:
        """Rows of a read in its own order: [layers * planes * heads * tokens, head_dim] of the arena's dtype."""
        layout, strides, span, device = self.layout, self._strides, read.span, self.rows.device
        if span.token_stop > len(read.blocks) * layout.block_size or span.layer_stop > layout.num_layers:
            raise InternalFault(f"{span} reaches past {len(read.blocks)} blocks of {layout}")
        tokens = torch.arange(span.token_start, span.token_stop, device=device)
        first = span.token_start // layout.block_size
        stop = -(-span.token_stop // layout.block_size)
        blocks = torch.tensor(read.blocks[first:stop], dtype=torch.int64, device=device)
        of_token = blocks[tokens // layout.block_size - first] * strides.block
        of_token += (tokens % layout.block_size) * strides.token
        of_head = torch.arange(span.head_start, span.head_stop, device=device) * strides.head
        within = of_head[:, None] + of_token if read.is_head_major else of_token[:, None] + of_head
        layers = torch.arange(span.layer_start, span.layer_stop, device=device) * strides.layer
        planes = torch.arange(layout.num_planes, device=device) * strides.kv
        index = (layers[:, None] + planes)[:, :, None] + within.flatten()
        return self.rows.index_select(0, index.flatten())

    def scatter(self, first_rows: Sequence[tuple[int, int]], rows: Tensor) -> None:
        """Write rows [n, head_dim] to runs of (first row, number of rows), in order."""
        start = 0
        if len(first_rows) == 1:
            first, count = first_rows[0]
            self.rows[first : first + count].copy_(rows)
            return
        runs = torch.tensor(first_rows, dtype=torch.int64)
        before = torch.cumsum(runs[:, 1], 0) - runs[:, 1]
        index = torch.arange(rows.shape[0]) + torch.repeat_interleave(runs[:, 0] - before, runs[:, 1])
        start = int(runs[:, 1].sum())
        if start != rows.shape[0]:
            raise InternalFault(f"{rows.shape[0]} rows for {start} places")
        self.rows.index_copy_(0, index.to(self.rows.device), rows.to(self.rows.device, self.rows.dtype))


def encode_rows(rows: Tensor) -> Tensor:
    """rows [n, head_dim] as the int8 wire has them: [n, SCALE_BYTES + head_dim] uint8; a row.s largest is 127."""
    scale = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()).float()
    scale.clamp_(min=torch.finfo(torch.float32).tiny * LARGEST_CODE).div_(LARGEST_CODE)
    codes = torch.div(rows, scale).round_().to(torch.int8)  # divided as float32, whatever the rows are
    coded = torch.empty(rows.shape[0], SCALE_BYTES + rows.shape[1], dtype=torch.uint8, device=rows.device)
    coded[:, :SCALE_BYTES] = scale.view(torch.uint8)
    coded[:, SCALE_BYTES:] = codes.view(torch.uint8)
    return coded


def decode_rows(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """What encode_rows() made, as rows [n, head_dim] of dtype."""
    scale = coded[:, :SCALE_BYTES].contiguous().view(torch.float32)
    return coded[:, SCALE_BYTES:].view(torch.int8).float().mul_(scale).to(dtype)


class OutgoingSpans:
    """What a sender reads: the arena, and reads of it behind its end. Implements `ConvertingMemory`.

    A read belongs to one write: opened before it, closed when it has finished.
    """

    def __init__(self, memory: Memory, rows: ArenaRows) -> None:
        self._memory = memory
        self._rows = rows
        self._first = -(-memory.num_bytes // ADDRESS_STEP) * ADDRESS_STEP
        self._lock = threading.Lock()
        self._reads: dict[int, SpanRead] = {}  # by address
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """One past the highest address that a read can have."""
        return self._first + MAX_READS * ADDRESS_STEP

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def open_read(self, read: SpanRead) -> Segment:
        """Where a read begins, and its bytes. Raises InternalFault when MAX_READS are open."""
        with self._lock:
            if len(self._reads) >= MAX_READS:
                raise InternalFault(f"{MAX_READS} converted reads are open; acknowledge or stop some")
            while (address := self._first + self._next * ADDRESS_STEP) in self._reads:
                self._next = (self._next + 1) % MAX_READS
            self._next = (self._next + 1) % MAX_READS
            self._reads[address] = read
        return Segment(address, read.num_bytes)

    def close_read(self, segment: Segment) -> None:
        with self._lock:
            self._reads.pop(segment.offset, None)

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Bytes of the arena, or of one open read. Raises InternalFault for a read that is not open."""
        if not segments or segments[0].offset < self._first:
            return self._memory.gather(segments)
        with self._lock:
            read = self._reads.get(segments[0].offset)
        if read is None or len(segments) != 1 or segments[0].length != read.num_bytes:
            raise InternalFault(f"{segments[:3]} is not one whole read that is open")
        return [_host_bytes(self.convert(read))]

    def convert(self, read: SpanRead) -> Tensor:
        """What a read stands for, as bytes [num_bytes]."""
        with torch.inference_mode():
            rows = self._rows.gather(read)
            if read.wire is KvWire.NATIVE:
                made = rows.to(TORCH_DTYPES[read.dtype])
            else:
                made = encode_rows(rows)
            return made.view(torch.uint8).flatten()

    def landing(self, segments: Sequence[Segment]) -> Landing:
        return self._memory.landing(segments)

    def check_invariants(self) -> None:
        with self._lock:
            for address, read in self._reads.items():
                if not self._first <= address < self.num_bytes or not 0 < read.num_bytes < ADDRESS_STEP:
                    raise InternalFault(f"read {read} at {address} is outside its addresses")


class CodedArena:
    """What a receiver lands in when the wire is compressed: the coded arena behind the arena. Implements `Memory`."""

    def __init__(self, memory: Memory, rows: ArenaRows, wire: KvWire) -> None:
        self._memory = memory
        self._rows = rows
        self._row_bytes, self._first = landing_rows(rows.layout, rows.num_blocks, wire)

    @property
    def num_bytes(self) -> int:
        return self._first + self._rows.rows.shape[0] * self._row_bytes

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        return self._memory.gather(segments)

    def landing(self, segments: Sequence[Segment]) -> Landing:
        """Raises InternalFault for segments that are not whole rows of the coded arena."""
        runs = []
        for offset, length in segments:
            first, rest = divmod(offset - self._first, self._row_bytes)
            if offset < self._first or rest or length % self._row_bytes or offset + length > self.num_bytes:
                raise InternalFault(f"segment {offset}+{length} is not whole rows of {self._row_bytes} coded bytes")
            runs.append((first, length // self._row_bytes))
        return CodedLanding(self._rows, self._row_bytes, runs)


class CodedLanding:
    """Coded rows of one frame; commit() decodes them into the arena."""

    def __init__(self, rows: ArenaRows, row_bytes: int, runs: list[tuple[int, int]]) -> None:
        self._rows = rows
        self._runs = runs
        self._coded = torch.empty(sum(count for _, count in runs), row_bytes, dtype=torch.uint8)

    @property
    def buffers(self) -> list[memoryview]:
        return [_host_bytes(self._coded.flatten())]

    def commit(self) -> None:
        with torch.inference_mode():
            dtype = TORCH_DTYPES[self._rows.layout.dtype]
            self._rows.scatter(self._runs, decode_rows(self._coded, dtype))


def rank_memory(arena: KvArena, wire: KvWire) -> tuple[OutgoingSpans, CodedArena | None]:
    """What the transports of an arena read and, where it is not the arena itself, land in."""
    rows = ArenaRows(arena.data, arena.layout, arena.num_blocks)
    return OutgoingSpans(arena, rows), None if wire is KvWire.NATIVE else CodedArena(arena, rows, wire)


def _host_bytes(data: Tensor) -> memoryview:
    """Bytes [n] of a tensor, copied only when it is not in host memory."""
    array: npt.NDArray[np.uint8] = data.cpu().numpy()
    return array.data
