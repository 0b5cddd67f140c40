"""The counters that fill the table of metrics."""

import pytest

from disagg.core.errors import InternalFault
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import MAX_LABEL_VALUES, MESSAGES_IGNORED, OTHER, OUTPUT_TOKENS, PUSHES, STEPS


def test_totals_are_kept_by_metric_and_label() -> None:
    counters = Counters()
    counters.add(OUTPUT_TOKENS, label="whole")
    counters.add(OUTPUT_TOKENS, 3, label="whole")
    counters.add(OUTPUT_TOKENS, 5, label="decode")
    counters.add(PUSHES, 0.5)
    assert counters.get(OUTPUT_TOKENS, "whole") == 4
    assert counters.get(OUTPUT_TOKENS, "decode") == 5
    assert counters.get(OUTPUT_TOKENS, "prefill") == 0
    assert sorted(counters.items()) == [
        (OUTPUT_TOKENS.name, "decode", 5),
        (OUTPUT_TOKENS.name, "whole", 4),
        (PUSHES.name, "", 0.5),
    ]
    counters.check_invariants()


def test_a_total_never_falls() -> None:
    counters = Counters()
    with pytest.raises(InternalFault, match=PUSHES.name):
        counters.add(PUSHES, -1)
    assert counters.get(PUSHES) == 0


def test_label_values_are_bounded_and_nothing_is_lost() -> None:
    counters = Counters()
    for number in range(3 * MAX_LABEL_VALUES):
        counters.add(MESSAGES_IGNORED, label=f"label-{number}")
    counters.add(MESSAGES_IGNORED, label="label-0")
    counters.check_invariants()
    labels = {label for _, label, _ in counters.items()}
    assert len(labels) == MAX_LABEL_VALUES + 1
    assert counters.get(MESSAGES_IGNORED, OTHER) == 2 * MAX_LABEL_VALUES
    assert counters.get(MESSAGES_IGNORED, "label-0") == 2
    assert sum(total for _, _, total in counters.items()) == 3 * MAX_LABEL_VALUES + 1


def test_a_value_that_the_table_does_not_list_counts_as_other_and_is_a_fault_of_ours() -> None:
    counters = Counters()
    counters.add(STEPS, label="prefill")
    counters.check_invariants()
    counters.add(STEPS, label="sideways")
    assert counters.get(STEPS, OTHER) == 1
    with pytest.raises(InternalFault, match=STEPS.name):
        counters.check_invariants()
