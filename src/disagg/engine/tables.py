"""Block tables of the sequences in flight, kept from step to step, so that a step only adds what is new.

row of the table      one sequence's blocks, in order of its tokens; rows are reused when others need them
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId, SequenceId

FIRST_ROWS, FIRST_WIDTH = 16, 64


class _Entry:
    """Where a sequence's table lies, and what it was copied from."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.blocks: tuple[BlockId, ...] = ()
        self.step = -1


class BlockTables:
    """blocks [rows, width] int32. Grows as needed; rows of sequences that were not in the last step may be reused."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.blocks: npt.NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)
        self._entries: dict[SequenceId, _Entry] = {}
        self._free = list(range(FIRST_ROWS))
        self._step = 0

    def begin_step(self) -> None:
        """Rows given out before may be reused from now on, unless they are asked for again."""
        self._step += 1

    def place(self, sequence_id: SequenceId, blocks: tuple[BlockId, ...]) -> int:
        """The row that now holds these blocks. Raises InternalFault for a block that the arena does not have."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            entry = self._entries[sequence_id] = _Entry(self._take_row())
        entry.step = self._step
        if entry.blocks is not blocks:
            self._write(sequence_id, entry, blocks)
        return entry.row

    def _write(self, sequence_id: SequenceId, entry: _Entry, blocks: tuple[BlockId, ...]) -> None:
        known = len(entry.blocks)
        start = known if blocks[:known] == entry.blocks else 0
        added = blocks[start:]
        if added and (min(added) < 0 or max(added) >= self._num_blocks):
            wrong = min(added) if min(added) < 0 else max(added)
            text = f"row of {sequence_id} names block {wrong}, the arena has 0 to {self._num_blocks - 1}"
            raise InternalFault(text)
        if len(blocks) > self.blocks.shape[1]:
            self._grow(self.blocks.shape[0], max(len(blocks), 2 * self.blocks.shape[1]))
        self.blocks[entry.row, start : len(blocks)] = added
        entry.blocks = blocks

    def _take_row(self) -> int:
        if not self._free:
            gone = [name for name, entry in self._entries.items() if entry.step < self._step - 1]
            self._free = [self._entries.pop(name).row for name in gone]
        if not self._free:
            num_rows = self.blocks.shape[0]
            self._grow(2 * num_rows, self.blocks.shape[1])
            self._free = list(range(num_rows, 2 * num_rows))
        return self._free.pop()

    def _grow(self, num_rows: int, width: int) -> None:
        grown = np.zeros((num_rows, width), np.int32)
        grown[: self.blocks.shape[0], : self.blocks.shape[1]] = self.blocks
        self.blocks = grown

    def slots(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], block_size: int
    ) -> npt.NDArray[np.int64]:
        """Slot of the token at each position of the sequence in each row."""
        return self.blocks[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def check_invariants(self) -> None:
        """Every row is free or one sequence's."""
        rows: Sequence[int] = [entry.row for entry in self._entries.values()] + self._free
        if sorted(rows) != list(range(self.blocks.shape[0])):
            raise InternalFault(f"rows {sorted(rows)} of {self.blocks.shape[0]} are in use or free")
