"""Who may register, who can serve, and what is said while nobody can."""

import pytest
from tests.unit.dispatch.rigs import MODEL, Desk, card, sent

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import WorkerId
from disagg.core.roles import Role, Task
from disagg.dispatch.actions import RefuseWorker, SendToWorker
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import (
    AnnouncePeers,
    AnswerRegistration,
    ReportState,
    StartSequence,
    WorkerState,
)
from disagg.telemetry.metrics import MESSAGES_IGNORED, MOVES


@pytest.mark.parametrize(
    ("refused", "kind", "said"),
    [
        (card("d1", Role.DECODE, model="nothing"), FailureKind.INVALID_REQUEST, ["d1", "nothing", "model, other"]),
        (card("d1", Role.DECODE, tokenizer="tik"), FailureKind.INVALID_REQUEST, ["d1", "tik", "tok"]),
        (card("d1", Role.DECODE, num_blocks=0), FailureKind.INVALID_REQUEST, ["d1", "cannot be used", "0 blocks"]),
        (card("d0", Role.DECODE, incarnation=2), FailureKind.OVERLOADED, ["d0", "taken", "--worker-id"]),
    ],
)
def test_refusals_name_the_values_and_leave_nothing(refused: WorkerCard, kind: FailureKind, said: list[str]) -> None:
    desk = Desk()
    desk.register(card("d0", Role.DECODE))
    before = [record.card for record in desk.dispatcher.registry.records()]
    (action,) = desk.register(refused)
    assert isinstance(action, RefuseWorker)
    assert action.worker_id == refused.worker_id
    assert isinstance(action.message, AnswerRegistration)
    failure = action.message.failure
    assert failure is not None
    assert failure.kind is kind
    assert [text for text in said if text not in failure.message] == []
    assert [record.card for record in desk.dispatcher.registry.records()] == before


def test_the_answer_comes_first_and_then_all_hear_whom_to_meet() -> None:
    desk = Desk()
    desk.register(card("p0", Role.PREFILL))
    decode = card("d0", Role.DECODE)
    first, *announcements = desk.register(decode)
    assert isinstance(first, SendToWorker)
    assert isinstance(first.message, AnswerRegistration)
    assert (first.worker_id, first.message.failure) == ("d0", None)
    assert dict(sent(AnnouncePeers, announcements)) == {
        "p0": AnnouncePeers((decode,)),  # the source side dials
        "d0": AnnouncePeers(()),
    }


def test_a_model_is_ready_once_a_pair_has_met_and_no_longer() -> None:
    desk = Desk()
    assert (desk.is_ready, desk.missing) == (False, "no worker has registered")
    desk.register(card("p0", Role.PREFILL))
    assert "no decode worker" in desk.missing
    desk.register(card("d0", Role.DECODE))
    assert "no two of them have paired" in desk.missing
    desk.pair("p0", "d0")
    assert (desk.is_ready, desk.missing) == (True, "")
    desk.lose("d0")
    assert not desk.is_ready
    desk.register(card("d0", Role.DECODE, incarnation=2))
    assert not desk.is_ready  # the old pairing is not the new process's
    desk.pair("p0", "d0", target_incarnation=2)
    assert desk.is_ready


def test_a_pairing_that_is_lost_makes_the_model_not_ready() -> None:
    desk = Desk().with_pair()
    desk.pair("p0", "d0", failure=Failure(FailureKind.WORKER_LOST, "the link broke"))
    assert not desk.is_ready
    assert "the link broke" in desk.missing
    desk.pair("p0", "d0")
    assert (desk.is_ready, desk.missing) == (True, "")


def test_a_refused_pairing_says_why() -> None:
    desk = Desk()
    desk.register(card("p0", Role.PREFILL))
    desk.register(card("d0", Role.DECODE))
    desk.pair("p0", "d0", failure=Failure(FailureKind.INVALID_REQUEST, "KV dtype float16 is not float32"))
    assert "no two of them have paired: KV dtype float16 is not float32" in desk.missing


def test_a_mixed_worker_is_ready_by_itself() -> None:
    desk = Desk()
    desk.register(card("m0", Role.MIXED, max_context=77))
    (status, other) = desk.dispatcher.models()
    assert (status.is_ready, status.max_context) == (True, 77)
    assert (other.model, other.is_ready, other.max_context) == ("other", False, None)


def test_the_context_of_a_model_is_its_largest_answering_workers() -> None:
    desk = Desk()
    desk.register(card("p0", Role.PREFILL, max_context=500))
    assert desk.dispatcher.models()[0].max_context is None
    desk.register(card("d0", Role.DECODE, max_context=100))
    desk.register(card("d1", Role.DECODE, max_context=300))
    assert desk.dispatcher.models()[0].max_context == 300


def test_messages_of_an_old_incarnation_are_ignored() -> None:
    desk = Desk().with_pair()
    desk.lose("d0")
    desk.register(card("d0", Role.DECODE, incarnation=2))
    state = ReportState(WorkerState(num_free_blocks=3))
    desk.hear("d0", state, incarnation=1)
    desk.hear("nobody", state)
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "ReportState") == 2
    record = desk.dispatcher.registry.get(WorkerId("d0"))
    assert record is not None
    assert record.state == WorkerState()
    desk.hear("d0", state, incarnation=2)
    assert record.state == state.state


def test_a_late_loss_of_an_old_incarnation_is_ignored() -> None:
    desk = Desk().with_pair()
    desk.lose("d0")
    desk.register(card("d0", Role.DECODE, incarnation=2))
    desk.pair("p0", "d0", target_incarnation=2)
    assert desk.lose("d0", incarnation=1) == []
    assert desk.is_ready


def test_workers_of_two_models_do_not_serve_each_other() -> None:
    desk = Desk()
    desk.register(card("p0", Role.PREFILL))
    desk.register(card("d0", Role.DECODE, model="other"))
    desk.pair("p0", "d0")
    assert [status.is_ready for status in desk.dispatcher.models()] == [False, False]
    assert desk.dispatcher.models()[0].model == MODEL


def test_a_worker_that_registers_again_has_lost_what_it_had() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit()
    desk.emit("p0", request_id, 0, token_id=50)
    actions = desk.register(card("d0", Role.DECODE))
    assert desk.is_ready  # its link to p0 was another connection
    started = [(name, each.task, each.attempt, each.emitted_ids) for name, each in sent(StartSequence, actions)]
    assert started == [("d0", Task.DECODE, 2, (50,)), ("p0", Task.PREFILL, 2, (50,))]
    assert desk.claims() == {"p0": (0, 11), "d0": (4, 0)}
    assert desk.dispatcher.counters.get(MOVES, "worker_lost") == 1


def test_the_answer_comes_first_for_a_worker_that_registers_again_too() -> None:
    desk = Desk().with_pair()
    desk.submit()
    actions = desk.register(card("d0", Role.DECODE))
    first = next(action for action in actions if isinstance(action, SendToWorker) and action.worker_id == "d0")
    assert isinstance(first.message, AnswerRegistration)
