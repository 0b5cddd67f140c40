"""Choices of one request share its prompt: who waits for whom, what is claimed, and what becomes of it."""

import msgspec
import pytest
from tests.unit.dispatch.rigs import Desk, card, error_in, events_of, sent, tokens_of

from disagg.core.errors import Failure, FailureKind, Unavailable
from disagg.core.formats import KvWire
from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.roles import Numerics, Role, Task
from disagg.dispatch.actions import DispatchAction
from disagg.dispatch.events import ChoiceStopped, ClientGone, DrainAsked
from disagg.policy.recovery import RecoveryLimits
from disagg.policy.routing import Path, Placement, PlacementReason
from disagg.protocol.messages import AbortSequence, ReportFailure, ReportState, StartSequence, WorkerState
from disagg.telemetry.metrics import PLACEMENTS

Start = tuple[str, int, Task]


def starts(actions: list[DispatchAction]) -> list[Start]:
    """(worker, choice, task) in order."""
    return [(name, start.spec.sequence_id.choice, start.task) for name, start in sent(StartSequence, actions)]


def whole(worker: str, *choices: int) -> list[Start]:
    return [(worker, choice, Task.WHOLE) for choice in choices]


def handed_over(choice: int, decode: str = "d0", prefill: str = "p0") -> list[Start]:
    return [(decode, choice, Task.DECODE), (prefill, choice, Task.PREFILL)]


def failure_of(request_id: RequestId, choice: int = 0, attempt: int = 1) -> ReportFailure:
    return ReportFailure(SequenceId(request_id, choice), attempt, Failure(FailureKind.INTERNAL, "the step failed"))


def two_decodes(recovery: RecoveryLimits | None = None) -> Desk:
    desk = Desk(recovery=recovery).with_pair()
    desk.register(card("d1", Role.DECODE))
    desk.pair("p0", "d1")
    return desk


# --- as it should be ---------------------------------------------------------------------------------------------


def test_one_prompt_is_read_and_handed_over_and_room_is_claimed_for_all() -> None:
    desk = two_decodes()
    request_id, actions = desk.submit(num_choices=4)  # 14 tokens each: 4 blocks
    assert starts(actions) == handed_over(0)
    assert desk.claims() == {"p0": (0, 10), "d0": (16, 0), "d1": (0, 0)}
    assert starts(desk.emit("p0", request_id, 0)) == []  # the prompt is read; its KV may be on its way
    desk.read("p0", request_id)
    # The decode worker says the first token too when it has taken over. 8 of 10 tokens are whole blocks.
    assert starts(desk.emit("d0", request_id, 0)) == whole("d0", 1, 2, 3)
    assert desk.claims() == {"p0": (0, 0), "d0": (16, 6), "d1": (0, 0)}
    assert starts(desk.emit("d0", request_id, 1)) == []
    placed = desk.choice(request_id, 2).placement
    assert placed == Placement(Path.LOCAL, PlacementReason.SHARED_PROMPT, WorkerId("d0"))
    assert desk.dispatcher.counters.get(PLACEMENTS, "shared_prompt") == 3


def test_on_a_mixed_worker_the_others_wait_for_the_first_token() -> None:
    desk = Desk()
    desk.register(card("m0", Role.MIXED))
    request_id, actions = desk.submit(num_choices=3)
    assert starts(actions) == whole("m0", 0)
    actions = desk.emit("m0", request_id, 0)
    assert (starts(actions), tokens_of(actions)) == (whole("m0", 1, 2), [0])
    placed = desk.choice(request_id, 1).placement
    assert placed is not None
    assert placed.path is Path.MIXED


def test_a_prompt_of_less_than_a_block_is_read_by_each() -> None:
    desk = two_decodes()
    _, actions = desk.submit(num_prompt=4, num_choices=2)  # the last token is always computed
    assert starts(actions) == [*handed_over(0), *handed_over(1, "d1")]


def test_cached_tokens_are_those_that_the_first_choice_found() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=2)
    desk.read("p0", request_id, num_cached=4)
    desk.emit("d0", request_id, 0)
    desk.read("d0", request_id, num_cached=8, choice=1)  # this request's own prompt
    opened = desk.dispatcher.open_request(request_id)
    assert opened is not None
    assert opened.num_cached_tokens == 4


def test_those_for_whom_there_is_no_room_lead_others_elsewhere() -> None:
    desk = Desk().with_pair(num_blocks=9)  # two answers of 4 blocks
    desk.register(card("d1", Role.DECODE, num_blocks=9))
    desk.pair("p0", "d1")
    request_id, actions = desk.submit(num_choices=4)
    assert starts(actions) == [*handed_over(0), *handed_over(2, "d1")]
    assert desk.claims() == {"p0": (0, 20), "d0": (8, 0), "d1": (8, 0)}
    assert starts(desk.emit("d1", request_id, 0, choice=2)) == whole("d1", 3)
    assert starts(desk.emit("d0", request_id, 0)) == whole("d0", 1)


def test_where_nobody_has_room_they_share_all_the_same() -> None:
    desk = Desk().with_pair(num_blocks=5)
    request_id, actions = desk.submit(num_choices=3)
    assert starts(actions) == handed_over(0)
    assert starts(desk.emit("d0", request_id, 0)) == whole("d0", 1, 2)


def test_kv_that_loses_something_on_the_way_is_shared_by_nobody() -> None:
    desk = Desk()
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        made = card(name, role)
        pool = msgspec.structs.replace(made.pool, numerics=Numerics.BOUNDED)
        desk.register(msgspec.structs.replace(made, pool=pool, kv_wire=KvWire.INT8))
    desk.pair("p0", "d0")
    _, actions = desk.submit(num_choices=2)
    assert starts(actions) == [*handed_over(0), *handed_over(1)]


# --- ends --------------------------------------------------------------------------------------------------------


def test_a_leader_that_ends_by_its_first_token_is_still_waited_for() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=1, num_choices=3)
    assert starts(desk.emit("p0", request_id, 0)) == []
    assert desk.claims()["d0"] == (0, 0)
    assert starts(desk.emit("d0", request_id, 0)) == whole("d0", 1, 2)
    for choice in (1, 2):
        desk.emit("d0", request_id, 0, choice=choice)
    assert (desk.dispatcher.num_open, desk.claims()["d0"]) == (0, (0, 0))


def test_but_not_for_ever() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=1, num_choices=3)
    desk.emit("p0", request_id, 0)
    assert desk.dispatcher.next_wake_s() == desk.now_s + 2.0
    assert starts(desk.wait(1.9)) == []
    assert starts(desk.wait(0.2)) == handed_over(1)
    assert starts(desk.emit("d0", request_id, 0, choice=1)) == whole("d0", 2)


def test_a_leader_stopped_by_its_text_makes_the_next_one_lead() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=3)
    desk.emit("p0", request_id, 0)
    actions = desk.handle(ChoiceStopped(request_id, 0))
    assert {message.sequence_id.choice for _, message in sent(AbortSequence, actions)} == {0}
    assert starts(actions) == handed_over(1)
    assert starts(desk.emit("d0", request_id, 0)) == []  # too late: nobody waits for it
    assert starts(desk.emit("d0", request_id, 0, choice=1)) == whole("d0", 2)


def test_a_client_that_leaves_takes_those_that_wait_along() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=3)
    actions = desk.handle(ClientGone(request_id))
    assert {message.sequence_id.choice for _, message in sent(AbortSequence, actions)} == {0}
    assert (desk.dispatcher.num_open, desk.claims()) == (0, {"p0": (0, 0), "d0": (0, 0)})
    assert starts(desk.emit("d0", request_id, 0)) == []


# --- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True])
def test_those_that_wait_move_with_their_leader(is_lost: bool) -> None:
    desk = two_decodes()
    request_id, _ = desk.submit(num_choices=3)
    actions = desk.lose("d0") if is_lost else desk.hear("d0", failure_of(request_id))
    assert starts(actions) == handed_over(0, "d1")
    assert desk.claims()["d1"] == (12, 0)
    assert starts(desk.emit("d1", request_id, 0)) == whole("d1", 1, 2)


def test_once_they_have_begun_each_moves_alone() -> None:
    desk = two_decodes()
    request_id, _ = desk.submit(num_choices=3)
    desk.emit("d0", request_id, 0)
    assert starts(desk.hear("d0", failure_of(request_id, choice=1))) == handed_over(1, "d1")
    actions = desk.lose("d0")
    assert starts(actions) == [*handed_over(0, "d1"), *handed_over(2, "d1")]


def test_waiting_has_the_deadlines_of_the_leader() -> None:
    desk = two_decodes(recovery=RecoveryLimits(max_attempts=2, max_queue_s=9.0, max_first_token_s=9.0))
    desk.submit(num_choices=2)
    assert desk.dispatcher.next_wake_s() == desk.now_s + 9.0
    assert isinstance(error_in(desk.wait(9.0)), Unavailable)
    request_id, _ = desk.submit(num_choices=2)
    desk.hear("d0", failure_of(request_id))
    assert isinstance(error_in(desk.hear("d1", failure_of(request_id, attempt=2))), Unavailable)
    assert (desk.dispatcher.num_open, desk.claims()["d0"], desk.claims()["d1"]) == (0, (0, 0), (0, 0))


def test_a_leader_that_no_worker_can_take_keeps_them_waiting_for_one() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=2)
    assert starts(desk.lose("d0")) == []
    desk.register(card("d0", Role.DECODE, incarnation=2))
    assert [desk.choice(request_id, index).is_placed for index in range(2)] == [True, False]
    assert events_of(desk.wait(20.0)) == []


def test_a_leader_moved_to_where_nothing_can_be_shared_is_left() -> None:
    desk = Desk().with_pair()
    wide = card("d1", Role.DECODE)
    desk.register(msgspec.structs.replace(wide, layout=msgspec.structs.replace(wide.layout, block_size=16)))
    desk.pair("p0", "d1")
    _, actions = desk.submit(num_choices=2)
    assert starts(actions) == handed_over(0)
    assert starts(desk.lose("d0")) == [*handed_over(0, "d1"), *handed_over(1, "d1")]


# --- drains ------------------------------------------------------------------------------------------------------


def test_they_begin_elsewhere_when_the_worker_of_their_leader_drains() -> None:
    desk = two_decodes()
    request_id, _ = desk.submit(num_choices=3)
    desk.handle(DrainAsked(WorkerId("d0")))  # so few tokens are finished in place
    actions = desk.emit("d0", request_id, 0)
    assert starts(actions) == handed_over(1, "d1")
    assert starts(desk.emit("d1", request_id, 0, choice=1)) == whole("d1", 2)


def test_they_begin_on_a_worker_that_drains_if_there_is_no_other() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=2)
    desk.hear("d0", ReportState(WorkerState(), is_draining=True))
    assert starts(desk.emit("d0", request_id, 0)) == whole("d0", 1)
