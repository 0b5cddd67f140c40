"""Block tables of the sequences in flight: kept from step to step, and brought up to date in place."""

import numpy as np
import pytest
from tests.unit.engine.steps import sequence_id

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.engine.tables import FIRST_ROWS, FIRST_WIDTH, BlockTables


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def placed(tables: BlockTables, number: int, blocks: tuple[BlockId, ...]) -> list[int]:
    """What the row of a sequence holds now."""
    row = tables.place(sequence_id(number), blocks)
    tables.check_invariants()
    held: list[int] = tables.blocks[row, : len(blocks)].tolist()
    return held


def test_a_table_that_grows_is_added_to_and_one_that_changed_is_written_anew() -> None:
    tables = BlockTables(100)
    for blocks in (ids(3, 4), ids(3, 4, 7), ids(3, 9, 7), ids(5)):
        tables.begin_step()
        assert placed(tables, 0, blocks) == list(blocks)


def test_nothing_is_written_for_a_table_that_stayed() -> None:
    """Of 128 streams, 8 get a block in a step: the others cost nothing but a look."""
    tables, blocks = BlockTables(100), ids(3, 4)
    row = tables.place(sequence_id(0), blocks)
    tables.blocks[row, :3] = (50, 51, 52)  # only to see who writes
    tables.begin_step()
    assert tables.place(sequence_id(0), blocks) == row
    assert tables.blocks[row, :3].tolist() == [50, 51, 52]
    tables.place(sequence_id(0), (*blocks, BlockId(9)))
    assert tables.blocks[row, :3].tolist() == [50, 51, 9]


def test_rows_of_those_that_are_gone_are_used_again_and_no_others() -> None:
    tables = BlockTables(100)
    first = {number: tables.place(sequence_id(number), ids(number)) for number in range(FIRST_ROWS)}
    assert sorted(first.values()) == list(range(FIRST_ROWS))
    kept: dict[int, int] = {}
    for _ in range(2):
        tables.begin_step()
        kept = {number: tables.place(sequence_id(number), ids(number)) for number in range(FIRST_ROWS // 2)}
    new = {number: tables.place(sequence_id(number), ids(number)) for number in range(50, 50 + FIRST_ROWS // 2)}
    tables.check_invariants()
    assert kept == {number: first[number] for number in kept}
    assert sorted(new.values()) == sorted(row for number, row in first.items() if number not in kept)
    assert len(tables.blocks) == FIRST_ROWS


def test_a_sequence_that_comes_back_is_written_anew() -> None:
    tables = BlockTables(100)
    for number in range(FIRST_ROWS):
        tables.place(sequence_id(number), ids(number))
    for number in (50, 51):
        tables.begin_step()
        tables.begin_step()
        placed(tables, number, ids(90))
    tables.begin_step()
    assert placed(tables, 3, ids(3)) == [3]


def test_more_rows_and_longer_ones_keep_what_is_there() -> None:
    tables = BlockTables(1000)
    tables.begin_step()
    rows = {number: tables.place(sequence_id(number), ids(number)) for number in range(3 * FIRST_ROWS)}
    long = ids(*range(FIRST_WIDTH + 1))
    tables.place(sequence_id(999), long)
    tables.check_invariants()
    assert tables.blocks.shape[1] > FIRST_WIDTH
    assert len(set(rows.values())) == 3 * FIRST_ROWS
    assert [tables.blocks[row, 0] for row in rows.values()] == list(rows)


@pytest.mark.parametrize("wrong", [-1, 100])
def test_a_block_that_is_not_there_is_named_and_the_table_stays(wrong: int) -> None:
    tables = BlockTables(100)
    placed(tables, 0, ids(3, 4))
    with pytest.raises(InternalFault, match=rf"names block {wrong}, the arena has 0 to 99"):
        tables.place(sequence_id(0), ids(3, 4, wrong))
    assert placed(tables, 0, ids(3, 4, 5)) == [3, 4, 5]


def test_slots_are_counted_through_blocks() -> None:
    tables = BlockTables(100)
    row = tables.place(sequence_id(0), ids(7, 2))
    positions = np.array([0, 15, 16, 31])
    assert tables.slots(np.full(4, row), positions, 16).tolist() == [112, 127, 32, 47]
