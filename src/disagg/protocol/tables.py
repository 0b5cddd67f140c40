"""Every table of the protocol, for documentation and for tests."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from disagg.protocol.handoff import DESTINATION_TABLE, PARTIAL_TABLE, SOURCE_TABLE
from disagg.protocol.lifecycle import CHOICE_TABLE, SEQUENCE_TABLE
from disagg.protocol.table import TransitionTable

TABLES: tuple[TransitionTable[Any, Any], ...] = (
    SEQUENCE_TABLE,
    SOURCE_TABLE,
    DESTINATION_TABLE,
    PARTIAL_TABLE,
    CHOICE_TABLE,
)

# Which tables' diagrams stand in which page of docs/.
DIAGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "architecture.md": tuple(table.name for table in TABLES),
        "handoff.md": (SOURCE_TABLE.name, DESTINATION_TABLE.name, PARTIAL_TABLE.name),
    }
)
