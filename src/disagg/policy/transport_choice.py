"""Which of the transports that two workers have in common carries KV from one to the other."""

import enum
from collections.abc import Sequence

import msgspec

from disagg.core.endpoints import TransportKind, TransportRate
from disagg.core.errors import InternalFault

TIE_SHARE = 0.1  # of the fastest: who comes so near is as fast

_ORDER = list(TransportKind)


class ChoiceReason(enum.StrEnum):
    """Why this one. One metric label each."""

    ONLY = "only"  # no other is offered by both
    FASTEST = "fastest"
    TIE = "tie"  # others are about as fast; its fence is the cheapest
    NOT_MEASURED = "not_measured"  # a fallback: rates are not known, so the cheapest fence decides


class TransportDecision(msgspec.Struct, frozen=True):
    """The answer."""

    kind: TransportKind
    reason: ChoiceReason


def choose_transport(rates: Sequence[TransportRate]) -> TransportDecision:
    """One rate for each kind that both workers can use. One that could not be measured is taken for want of others.

    Raises InternalFault when there is none: such a pair must be refused before.
    """
    if not rates:
        raise InternalFault("two workers without a common transport were paired")
    if len(rates) == 1:
        return TransportDecision(rates[0].kind, ChoiceReason.ONLY)
    working = [rate for rate in rates if not rate.failure]
    if not working or not all(rate.bytes_per_s > 0 for rate in working):
        return TransportDecision(_cheapest_fence(working or rates), ChoiceReason.NOT_MEASURED)
    fastest = max(rate.bytes_per_s for rate in working)
    near = [rate for rate in working if rate.bytes_per_s >= (1 - TIE_SHARE) * fastest]
    return TransportDecision(_cheapest_fence(near), ChoiceReason.TIE if len(near) > 1 else ChoiceReason.FASTEST)


def _cheapest_fence(rates: Sequence[TransportRate]) -> TransportKind:
    return max((rate.kind for rate in rates), key=_ORDER.index)
