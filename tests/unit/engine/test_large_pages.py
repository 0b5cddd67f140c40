"""Memory for weights: pieces of their own, aligned, given back with the last one."""

import gc

import numpy as np
import psutil

from disagg.engine.large_pages import ALIGNMENT, CHUNK_BYTES, LargePages

SIZES = [1, 63, 64, 65, 4096, CHUNK_BYTES // 3, CHUNK_BYTES, 3 * CHUNK_BYTES + 5, 1 << 20]


def test_pieces_are_aligned_and_nobody_elses() -> None:
    memory = LargePages()
    pieces = [memory.take(size) for size in SIZES]
    for number, (piece, size) in enumerate(zip(pieces, SIZES, strict=True)):
        assert len(piece) == size
        assert piece.ctypes.data % ALIGNMENT == 0
        assert piece.flags.writeable
        piece[[0, -1]] = number
    assert [(piece[0], piece[-1]) for piece in pieces] == [(number, number) for number in range(len(SIZES))]


def test_a_chunk_goes_back_with_its_last_piece() -> None:
    gc.collect()  # what others have left must not go meanwhile
    memory, process = LargePages(), psutil.Process()
    before = process.memory_info().rss
    piece = memory.take(2 * CHUNK_BYTES)
    piece[:: 1 << 12] = 1
    assert process.memory_info().rss - before > 1.9 * CHUNK_BYTES
    part = piece[:10]
    del piece, memory
    gc.collect()
    assert np.array_equal(part[:1], [1])
    assert process.memory_info().rss - before > 1.9 * CHUNK_BYTES
    del part
    gc.collect()
    assert process.memory_info().rss - before < 0.2 * CHUNK_BYTES
