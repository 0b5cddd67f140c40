"""What a source tells its peer of the way between them, which decides whether a first step begins early."""

import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, card, handoff, to_peer

from disagg.core.roles import Role, Task
from disagg.protocol.messages import FinishPrefill
from disagg.scheduler import events

PROMPT = tuple(range(10))
MEASURED = 12_500.0


def told(measured: tuple[float, ...], *, acknowledged: bool) -> float:
    """What goes with the first token of a first hand-off."""
    solo = Solo(Role.PREFILL)
    for bytes_per_s in measured:
        solo.handle(events.PeerPaired(card(PEER, PEER_INCARNATION, Role.DECODE), bytes_per_s))
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.layers(1)
    solo.now_s += 2.0
    if acknowledged:
        solo.handle(events.WriteFinished(handoff(0), 0, None))
    (message,) = to_peer(FinishPrefill, solo.finish_step())
    return message.bytes_per_s


def test_the_source_tells_what_it_has_seen_of_the_link() -> None:
    assert told((0.0,), acknowledged=True) == pytest.approx(10 * 16 / 2.0)


def test_before_it_has_seen_anything_it_tells_what_was_measured() -> None:
    assert told((MEASURED,), acknowledged=False) == MEASURED
    assert told((0.0, MEASURED), acknowledged=False) == MEASURED  # measured once they had met
    assert told((0.0,), acknowledged=False) == 0.0


def test_what_it_has_seen_counts_more() -> None:
    assert told((MEASURED,), acknowledged=True) == pytest.approx(10 * 16 / 2.0)


def test_what_was_measured_goes_with_the_peer_and_is_not_reported_as_learned() -> None:
    solo = Solo(Role.PREFILL)
    solo.handle(events.PeerPaired(card(PEER, PEER_INCARNATION, Role.DECODE), MEASURED))
    assert [link.bytes_per_s for link in solo.state.links] == [0.0]
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "it ended"))
    assert solo.state.links == ()
