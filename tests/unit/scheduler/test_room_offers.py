"""Refused hand-offs are told when there is room: one at a time, tenants in turn, and nothing is kept for them."""

import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, sequence_id, to_peer

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, HandoffId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.protocol.messages import AnswerReservation, OfferReservation, RequestReservation
from disagg.scheduler import events
from disagg.scheduler.actions import Action

PROMPT = tuple(range(10))
LONG = (1, 2, 3, 4, 5)
NUM_STEPS = 9  # until the long answer ends


def full_destination(num_refused: int, order: tuple[int, ...] = (), num_blocks: int = 6) -> Solo:
    """4 blocks are in use for NUM_STEPS steps; hand-offs of 3 blocks were refused, in this order."""
    solo = Solo(Role.DECODE, num_blocks=num_blocks)
    solo.meet(Role.PREFILL)
    solo.start(9, Task.WHOLE, LONG, max_tokens=NUM_STEPS)
    for number in range(num_refused):
        solo.start(number, Task.DECODE, PROMPT)
    for number in order or range(num_refused):
        assert offered(ask(solo, number)) == []
    return solo


def ask(solo: Solo, number: int) -> list[Action]:
    return solo.hear(RequestReservation(handoff(number), solo.fence(), len(PROMPT)))


def is_granted(actions: list[Action]) -> bool:
    (answer,) = to_peer(AnswerReservation, actions)
    return answer.failure is None


def offered(actions: list[Action]) -> list[HandoffId]:
    return [offer.handoff_id for offer in to_peer(OfferReservation, actions)]


def end_long_answer(solo: Solo) -> list[HandoffId]:
    """Who is told of room when it ends; nobody is before."""
    for _ in range(NUM_STEPS - 1):
        assert offered(solo.finish_step()) == []
    return offered(solo.finish_step())


def test_a_refused_hand_off_is_told_when_it_fits_and_then_gets_its_room() -> None:
    solo = full_destination(1)
    assert end_long_answer(solo) == [handoff(0)]
    assert solo.num_used == 0  # nothing is kept
    assert is_granted(ask(solo, 0))


def test_the_oldest_is_told_first_and_the_next_when_it_has_asked() -> None:
    solo = full_destination(3, order=(2, 0, 1))
    assert end_long_answer(solo) == [handoff(0)]
    actions = ask(solo, 0)
    assert is_granted(actions)
    assert offered(actions) == [handoff(1)]
    actions = ask(solo, 1)
    assert is_granted(actions)
    assert offered(actions) == []  # there is no room for the third
    assert offered(solo.abort(0)) == []  # blocks that may still be written to are not free
    assert offered(solo.handle(events.GrantFenced(handoff(0)))) == [handoff(2)]


# Who is refused, by number: tenant and priority. Lower numbers are older.
CROWD = {0: ("many", 0), 1: ("many", 0), 2: ("many", 0), 3: ("few", 0), 4: ("many", 1)}


def crowded_destination() -> Solo:
    solo = full_destination(0, num_blocks=5)  # room for one at a time
    for number, (tenant, priority) in CROWD.items():
        spec = SequenceSpec(sequence_id(number), PROMPT, SamplingParams(3), priority, tenant=tenant, cache_salt=tenant)
        solo.start_spec(spec, Task.DECODE)
        assert not is_granted(ask(solo, number))
    return solo


def order_told(solo: Solo) -> list[int]:
    """Each that is told gets its room, and goes before the next one is."""
    order: list[int] = []
    told = end_long_answer(solo)
    while told:
        (handoff_id,) = told
        order.append(handoff_id.sequence_id.request_id.number)
        assert is_granted(ask(solo, order[-1]))
        solo.abort(order[-1])
        told = offered(solo.handle(events.GrantFenced(handoff_id)))
    return order


def test_the_more_important_is_told_first_and_tenants_take_turns() -> None:
    assert order_told(crowded_destination()) == [4, 3, 0, 1, 2]


def test_tenants_take_turns_also_when_all_have_been_refused_for_long() -> None:
    """Nobody overtakes its own tenant's older ones any more, however important; nor a tenant that had no more."""
    solo = crowded_destination()
    solo.wait(solo.config.starvation_s + 0.1)
    assert order_told(solo) == [0, 3, 1, 2, 4]


def test_who_was_told_and_does_not_ask_lets_the_next_one_go() -> None:
    solo = full_destination(2)
    assert end_long_answer(solo) == [handoff(0)]
    assert offered(solo.wait(0)) == []
    wait_s = solo.scheduler.next_wake_s() - solo.now_s
    assert wait_s == pytest.approx(solo.config.retry_s)
    assert offered(solo.wait(wait_s + 1e-9)) == [handoff(1)]
    assert offered(solo.wait(1.0)) == []  # nobody is left to tell
    assert is_granted(ask(solo, 1))
    assert is_granted(ask(solo, 0))  # late, and there is room


def test_who_was_told_and_is_refused_again_is_told_again() -> None:
    solo = full_destination(1)
    assert end_long_answer(solo) == [handoff(0)]
    solo.start(8, Task.WHOLE, LONG, max_tokens=NUM_STEPS)  # somebody else was faster
    assert not is_granted(ask(solo, 0))
    assert end_long_answer(solo) == [handoff(0)]


def test_who_has_ended_is_not_told() -> None:
    solo = full_destination(2)
    solo.abort(0)
    assert end_long_answer(solo) == [handoff(1)]
    solo.abort(1)
    assert solo.scheduler.is_idle
    assert solo.scheduler.next_wake_s() == float("inf")


def test_a_peer_that_is_lost_takes_its_place_in_the_queue_along() -> None:
    solo = full_destination(2)
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
    assert end_long_answer(solo) == []


# --- the source ----------------------------------------------------------------------------------------------------


def refused_source(number: int = 0) -> Solo:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    solo.start(number, Task.PREFILL, PROMPT)
    refusal = AnswerReservation(handoff(number), solo.fence(), Failure(FailureKind.OVERLOADED, "full"), 3.0)
    assert to_peer(RequestReservation, solo.hear(refusal)) == []
    return solo


def test_a_source_asks_again_when_it_is_told_and_not_twice() -> None:
    solo = refused_source()
    assert to_peer(RequestReservation, solo.wait(1.0)) == []
    (request,) = to_peer(RequestReservation, solo.hear(OfferReservation(handoff(0), solo.fence())))
    assert request.handoff_id == handoff(0)
    assert solo.hear(OfferReservation(handoff(0), solo.fence())) == []
    assert solo.ignored("OfferReservation") == 1


@pytest.mark.parametrize("attempt", [2, 7])
def test_an_offer_to_another_attempt_is_ignored(attempt: int) -> None:
    solo = refused_source()
    fence = solo.fence()
    assert solo.hear(OfferReservation(handoff(0), Fence(fence.source, fence.destination, attempt))) == []
    assert solo.hear(OfferReservation(handoff(5), fence)) == []
    assert solo.ignored("OfferReservation") == 2


def test_a_source_that_is_never_told_asks_by_itself_in_the_end() -> None:
    solo = refused_source()
    assert len(to_peer(RequestReservation, solo.wait(3.0))) == 1
