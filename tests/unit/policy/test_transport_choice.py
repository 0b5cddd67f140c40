"""The fastest transport is taken; of those that are about as fast, the one with the cheapest fence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.endpoints import TransportKind, TransportRate
from disagg.core.errors import InternalFault
from disagg.policy.transport_choice import TIE_SHARE, ChoiceReason, TransportDecision, choose_transport

TCP, SHARED = TransportKind.TCP, TransportKind.SHARED_MEMORY
ONLY, FASTEST, TIE, NOT_MEASURED = ChoiceReason


def rate(kind: TransportKind, bytes_per_s: float = 0.0, failure: str = "") -> TransportRate:
    return TransportRate(kind, bytes_per_s, failure=failure)


@pytest.mark.parametrize(
    ("rates", "kind", "reason"),
    [
        ([rate(TCP)], TCP, ONLY),
        ([rate(TCP, failure="refused")], TCP, ONLY),
        ([rate(TCP, 1e9), rate(SHARED, 4e9)], SHARED, FASTEST),
        ([rate(TCP, 4e9), rate(SHARED, 1e9)], TCP, FASTEST),
        ([rate(TCP, 4e9), rate(SHARED, 3.61e9)], SHARED, TIE),
        ([rate(TCP, 4e9), rate(SHARED, 3.59e9)], TCP, FASTEST),
        ([rate(SHARED, 3.7e9), rate(TCP, 4e9)], SHARED, TIE),
        ([rate(TCP), rate(SHARED)], SHARED, NOT_MEASURED),
        ([rate(TCP, 4e9), rate(SHARED)], SHARED, NOT_MEASURED),
        ([rate(TCP, 1e9), rate(SHARED, failure="it does not answer")], TCP, FASTEST),
        ([rate(TCP), rate(SHARED, failure="it does not answer")], TCP, NOT_MEASURED),
        ([rate(TCP, failure="refused"), rate(SHARED, failure="silent")], SHARED, NOT_MEASURED),
    ],
)
def test_each_case(rates: list[TransportRate], kind: TransportKind, reason: ChoiceReason) -> None:
    assert choose_transport(rates) == TransportDecision(kind, reason)


def test_a_pair_without_a_transport_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalFault, match="common transport"):
        choose_transport([])


@given(st.lists(st.sampled_from(TransportKind), min_size=1, unique=True), st.data())
def test_nobody_taken_is_much_slower_than_another_and_order_does_not_matter(
    kinds: list[TransportKind], data: st.DataObject
) -> None:
    rates = [rate(kind, data.draw(st.floats(1.0, 1e10))) for kind in kinds]
    decision = choose_transport(rates)
    (taken,) = [each.bytes_per_s for each in rates if each.kind is decision.kind]
    assert taken >= (1 - TIE_SHARE) * max(each.bytes_per_s for each in rates)
    assert choose_transport(data.draw(st.permutations(rates))) == decision
