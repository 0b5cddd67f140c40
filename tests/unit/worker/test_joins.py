"""Many answers that are one."""

import threading

import pytest

from disagg.core.errors import InternalFault
from disagg.worker.joins import Joined, JoinTable


def test_the_last_answer_is_the_answer_and_the_first_failure_its_reason() -> None:
    table: JoinTable[str] = JoinTable()
    table.expect("a", 3)
    assert [table.take("a"), table.take("a", "reset"), table.take("a", "gone")] == [None, None, Joined("reset")]
    assert len(table) == 0
    table.expect("a", 1)
    assert table.take("a") == Joined(None)
    table.check_invariants()


def test_what_nobody_waits_for_is_nothing() -> None:
    table: JoinTable[str] = JoinTable()
    assert table.take("late", "reset") is None
    table.check_invariants()


@pytest.mark.parametrize("num_parts", [0, 1])
def test_one_round_at_a_time_of_one_or_more(num_parts: int) -> None:
    table: JoinTable[str] = JoinTable()
    if num_parts:
        table.expect("a", num_parts)
    with pytest.raises(InternalFault, match="answers cannot be expected for a"):
        table.expect("a", num_parts)


def test_of_answers_from_many_threads_exactly_one_is_the_last() -> None:
    table: JoinTable[int] = JoinTable()
    for key in range(200):
        table.expect(key, 4)
    found: list[Joined | None] = []

    def answer() -> None:
        found.extend([table.take(key) for key in range(200)])

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert found.count(Joined(None)) == 200
    assert found.count(None) == 600
    assert len(table) == 0
