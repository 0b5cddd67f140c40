"""State machines as tables: every one is sound, and an illegal trigger is told with the whole story."""

import enum
from typing import Any

import pytest

from disagg.core.errors import InternalFault
from disagg.protocol.handoff import DESTINATION_TABLE, PARTIAL_TABLE, SOURCE_TABLE
from disagg.protocol.lifecycle import CHOICE_TABLE, SEQUENCE_TABLE, SequenceState, SequenceTrigger
from disagg.protocol.table import Machine, TransitionTable
from disagg.protocol.tables import TABLES

every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


def test_the_list_of_tables_is_whole() -> None:
    assert set(TABLES) == {SEQUENCE_TABLE, CHOICE_TABLE, SOURCE_TABLE, DESTINATION_TABLE, PARTIAL_TABLE}
    assert len({table.name for table in TABLES}) == 5


def members(example: enum.Enum) -> set[enum.Enum]:
    """All members of the enum that this one is of."""
    return set(type(example))


@every_table
def test_all_states_are_reached_and_all_triggers_used(table: TransitionTable[Any, Any]) -> None:
    reached = {table.initial}
    for _ in table.rows():
        reached |= {target for source, _, target in table.rows() if source in reached}
    assert reached == members(table.initial)
    triggers = {trigger for _, trigger, _ in table.rows()}
    assert triggers == members(next(iter(triggers)))


@every_table
def test_every_state_leads_to_an_end_and_ends_have_no_way_out(table: TransitionTable[Any, Any]) -> None:
    assert table.final
    assert not {source for source, _, _ in table.rows()} & table.final
    ending = set(table.final)
    for _ in table.rows():
        ending |= {source for source, _, target in table.rows() if target in ending}
    assert ending == members(table.initial)


@every_table
def test_a_machine_does_exactly_what_its_table_says(table: TransitionTable[Any, Any]) -> None:
    triggers = type(table.rows()[0][1])
    legal = {(source, trigger): target for source, trigger, target in table.rows()}
    for state in type(table.initial):
        for trigger in triggers:
            machine = Machine(table, "subject")
            machine.state = state
            if (state, trigger) in legal:
                assert machine.fire(trigger) is machine.state is legal[state, trigger]
            else:
                with pytest.raises(InternalFault):
                    machine.fire(trigger)
                assert machine.state is state


def test_an_illegal_trigger_is_told_with_the_whole_story() -> None:
    machine = Machine(SEQUENCE_TABLE, "ab-7.0 (whole)")
    with pytest.raises(InternalFault, match=r"so far: nothing"):
        machine.fire(SequenceTrigger.FINISHED)
    machine.fire(SequenceTrigger.BLOCKS_ALLOCATED)
    machine.fire(SequenceTrigger.PROMPT_COMPUTED)
    with pytest.raises(InternalFault) as caught:
        machine.fire(SequenceTrigger.BLOCKS_RESERVED)
    assert str(caught.value) == (
        "sequence ab-7.0 (whole): no blocks reserved in state DECODING (so far: blocks allocated prompt computed)"
    )
    assert machine.state is SequenceState.DECODING


class Light(enum.StrEnum):
    RED = "RED"
    GREEN = "GREEN"
    OFF = "OFF"


class Signal(enum.StrEnum):
    GO = "go"
    HALT = "halt"
    CUT = "power cut"


def test_a_diagram_is_mermaid_in_table_order() -> None:
    table = TransitionTable(
        "light",
        Light.RED,
        {
            (Light.RED, Signal.GO): Light.GREEN,
            (Light.GREEN, Signal.HALT): Light.RED,
            (Light.GREEN, Signal.CUT): Light.OFF,
        },
    )
    assert table.diagram().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> RED",
        "    RED --> GREEN: go",
        "    GREEN --> RED: halt",
        "    GREEN --> OFF: power cut",
        "    OFF --> [*]",
    ]


@every_table
def test_a_diagram_shows_each_row_once(table: TransitionTable[Any, Any]) -> None:
    lines = table.diagram().splitlines()
    assert len(lines) == 2 + len(table.rows()) + len(table.final)
    assert len(set(lines)) == len(lines)
