"""An open request from submit to its end; whatever the end, the claims go back."""

import msgspec
import pytest
from tests.unit.dispatch.rigs import MODEL, ROUTER, Desk, card, error_in, events_of, sent, tokens_of

from disagg.core.errors import (
    DisaggError,
    Failure,
    FailureKind,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from disagg.core.ids import HandoffId, Incarnation, RequestId, SequenceId
from disagg.core.request import FinishReason, SamplingParams
from disagg.core.roles import Role, Task
from disagg.dispatch.config import RETRY_AFTER_S
from disagg.dispatch.events import ChoiceStopped, ClientGone
from disagg.dispatch.gate import error_of
from disagg.dispatch.stream import GenerateRequest, TokensDelivered
from disagg.policy.recovery import Recovery, Verdict
from disagg.protocol.messages import AbortSequence, EmitTokens, PromptReport, ReportFailure, StartSequence
from disagg.telemetry.metrics import GENERATED_TOKENS, MESSAGES_IGNORED, PLACEMENTS, REJECTIONS, REQUESTS

NO_CLAIMS = {"p0": (0, 0), "d0": (0, 0)}


def failed(request_id: RequestId, kind: FailureKind = FailureKind.INTERNAL, choice: int = 0) -> ReportFailure:
    return ReportFailure(SequenceId(request_id, choice), 1, Failure(kind, "the step failed"))


def finishes(desk: Desk, request_id: RequestId) -> list[FinishReason | None]:
    opened = desk.dispatcher.open_request(request_id)
    assert opened is not None
    return [choice.entry.finish for choice in opened.choices]


# --- submit ------------------------------------------------------------------------------------------------------


def test_decode_hears_first_and_each_side_is_told_of_the_other() -> None:
    desk = Desk().with_pair()
    request_id, actions = desk.submit()
    (first, to_decode), (second, to_prefill) = sent(StartSequence, actions)
    assert (first, second) == ("d0", "p0")
    assert (to_decode.task, to_decode.peer, to_decode.peer_incarnation) == (Task.DECODE, "p0", 1)
    assert (to_prefill.task, to_prefill.peer, to_prefill.peer_incarnation) == (Task.PREFILL, "d0", 1)
    assert to_decode.spec == to_prefill.spec
    assert to_decode.spec.sequence_id == SequenceId(request_id, 0)
    assert desk.claims() == {"p0": (0, 10), "d0": (4, 0)}  # 10 + 4 - 1 tokens are 4 blocks of 4


def test_a_short_prompt_goes_to_decode_alone() -> None:
    desk = Desk(local_prefill_tokens=10).with_pair()
    _, actions = desk.submit(num_prompt=10)
    ((worker, message),) = sent(StartSequence, actions)
    assert (worker, message.task, message.peer) == ("d0", Task.WHOLE, None)
    assert desk.claims() == {"p0": (0, 0), "d0": (4, 10)}
    assert desk.dispatcher.counters.get(PLACEMENTS, "short_prompt") == 1


def request(**more: object) -> GenerateRequest:
    fields: dict[str, object] = {"model": MODEL, "prompt_ids": (1, 2, 3), "sampling": SamplingParams(4)}
    return GenerateRequest(**{**fields, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "error", "reason", "said"),
    [
        ({"model": "unheard"}, ModelNotFound, "model_not_found", ["unheard", MODEL]),
        ({"prompt_ids": ()}, InvalidRequest, "impossible", ["0 tokens"]),
        ({"prompt_ids": (1,) * 200}, InvalidRequest, "impossible", ["200"]),
        ({"sampling": SamplingParams(198)}, InvalidRequest, "impossible", ["198", "200", "at most 197"]),
        ({"model": "other"}, Unavailable, "unavailable", ["other", "no worker has registered"]),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_no_claim(
    bad: dict[str, object], error: type[DisaggError], reason: str, said: list[str]
) -> None:
    desk = Desk().with_pair()
    with pytest.raises(error) as caught:
        desk.dispatcher.submit(request(**bad), desk.now_s)
    assert [text for text in said if text not in str(caught.value)] == []
    desk.dispatcher.check_invariants()
    assert desk.claims() == NO_CLAIMS
    assert desk.dispatcher.num_open == 0
    assert desk.dispatcher.counters.get(REJECTIONS, reason) == 1
    _, actions = desk.submit()  # nothing of the refused one is sent with the next
    assert len(sent(StartSequence, actions)) == 2


def test_without_a_pair_the_answer_says_what_is_missing() -> None:
    desk = Desk()
    desk.register(card("d0", Role.DECODE))
    with pytest.raises(Unavailable, match="no prefill worker has registered") as caught:
        desk.submit()
    assert caught.value.retry_after_s > 0
    assert desk.claims() == {"d0": (0, 0)}


def test_more_than_the_limit_of_open_requests_is_an_overload() -> None:
    desk = Desk(max_open_requests=2).with_pair()
    first, _ = desk.submit()
    desk.submit()
    with pytest.raises(Overloaded, match="2 requests are open, the limit is 2"):
        desk.submit()
    desk.handle(ClientGone(first))
    desk.submit()


def test_an_open_end_is_lowered_to_what_fits() -> None:
    desk = Desk().with_pair(num_blocks=10)
    open_ended = request(sampling=SamplingParams(10**6), is_open_ended=True)
    _, actions = desk.dispatcher.submit(open_ended, desk.now_s)
    assert sent(StartSequence, actions)[0][1].spec.sampling.max_tokens == 38  # 3 + 38 - 1 tokens are 10 blocks
    with pytest.raises(InvalidRequest):
        desk.dispatcher.submit(msgspec.structs.replace(open_ended, is_open_ended=False), desk.now_s)


def test_request_ids_are_this_routers_and_never_repeat() -> None:
    desk = Desk().with_pair()
    assert [desk.submit()[0] for _ in range(3)] == [RequestId(ROUTER, number) for number in range(3)]


# --- tokens ------------------------------------------------------------------------------------------------------


def test_tokens_of_both_workers_are_delivered_once_and_in_order() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit()
    assert tokens_of(desk.emit("d0", request_id, 1)) == []
    assert tokens_of(desk.emit("p0", request_id, 0)) == [0, 1]
    assert tokens_of(desk.emit("d0", request_id, 0, token_id=50)) == []
    assert desk.dispatcher.counters.get(GENERATED_TOKENS) == 2


def test_the_last_token_ends_the_request_and_gives_the_claims_back() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=2)
    desk.emit("p0", request_id, 0)
    actions = desk.emit("d0", request_id, 1)
    (event,) = events_of(actions)
    assert isinstance(event, TokensDelivered)
    assert event.finish_reason is FinishReason.LENGTH
    assert sent(AbortSequence, actions) == []  # the workers know by themselves
    assert (desk.dispatcher.num_open, desk.claims()) == (0, NO_CLAIMS)
    assert desk.dispatcher.counters.get(REQUESTS, "finished") == 1
    assert desk.emit("d0", request_id, 1) == []
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "token") == 1


def test_a_prompt_that_is_read_waits_no_more() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit()
    desk.read("p0", request_id, num_cached=8)
    assert desk.claims() == {"p0": (0, 0), "d0": (4, 0)}
    opened = desk.dispatcher.open_request(request_id)
    assert opened is not None
    assert opened.num_cached_tokens == 8


def test_a_prompt_is_read_once_for_the_account() -> None:
    """A preempted sequence reads again and finds its own KV, answer and all."""
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=90)
    desk.read("p0", request_id, num_cached=3)
    for name in ("p0", "d0"):
        desk.read(name, request_id, num_cached=60)
        assert desk.choice(request_id).num_cached_tokens == 3


def test_reports_of_unknown_sequences_are_harmless() -> None:
    desk = Desk().with_pair()
    stranger = SequenceId(RequestId(Incarnation(99), 0), 0)
    assert desk.hear("d0", EmitTokens((), (PromptReport(HandoffId(stranger, 1), 1, 2),))) == []
    assert desk.emit("d0", stranger.request_id, 0) == []
    assert desk.hear("d0", failed(stranger.request_id)) == []


@pytest.mark.parametrize("kind", ["token", "failure"])
def test_a_choice_that_does_not_exist_is_ignored(kind: str) -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit()
    if kind == "token":
        assert desk.emit("d0", request_id, 0, choice=7) == []
    else:
        assert desk.hear("d0", failed(request_id, choice=7)) == []


# --- ends --------------------------------------------------------------------------------------------------------


def test_each_choice_ends_by_itself_and_the_last_one_ends_the_request() -> None:
    desk = Desk().with_pair()
    request_id, actions = desk.submit(num_prompt=4, max_tokens=1, num_choices=3)  # no block to share
    assert len(sent(StartSequence, actions)) == 6
    assert desk.claims() == {"p0": (0, 12), "d0": (3, 0)}
    for choice, left in ((1, 2), (0, 1)):
        desk.emit("p0", request_id, 0, choice=choice)
        assert desk.claims()["d0"][0] == left
    assert finishes(desk, request_id) == [FinishReason.LENGTH, FinishReason.LENGTH, None]
    desk.emit("p0", request_id, 0, choice=2)
    assert (desk.dispatcher.num_open, desk.claims()) == (0, NO_CLAIMS)


def test_a_failed_choice_ends_all_with_one_error() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_prompt=4, max_tokens=2, num_choices=3)
    for position in range(2):
        desk.emit("p0", request_id, position, choice=0)
    actions = desk.hear("d0", failed(request_id, FailureKind.INVALID_REQUEST, choice=1))
    assert isinstance(error_in(actions), InvalidRequest)
    aborted = {(worker, message.sequence_id.choice) for worker, message in sent(AbortSequence, actions)}
    assert aborted == {(worker, choice) for worker in ("p0", "d0") for choice in (1, 2)}
    assert (desk.dispatcher.num_open, desk.claims()) == (0, NO_CLAIMS)
    assert desk.dispatcher.counters.get(REQUESTS, "failed") == 1
    assert desk.hear("p0", failed(request_id, choice=2)) == []  # the other end says so as well


def test_a_late_failure_of_a_finished_choice_is_ignored() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=1, num_choices=2)
    desk.emit("p0", request_id, 0, choice=0)
    assert desk.hear("d0", failed(request_id, choice=0)) == []
    assert desk.dispatcher.num_open == 1
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "ReportFailure") == 1


def test_a_stop_string_aborts_at_both_workers_and_keeps_the_rest() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(num_choices=2)
    desk.emit("p0", request_id, 0, choice=0)
    actions = desk.handle(ChoiceStopped(request_id, 0))
    assert {worker for worker, _ in sent(AbortSequence, actions)} == {"p0", "d0"}
    assert {message.sequence_id.choice for _, message in sent(AbortSequence, actions)} == {0}
    assert desk.emit("d0", request_id, 1, choice=0) == []
    assert desk.handle(ChoiceStopped(request_id, 0)) == []
    assert tokens_of(desk.emit("p0", request_id, 0, choice=1)) == [0]
    desk.handle(ChoiceStopped(request_id, 1))
    assert (desk.dispatcher.num_open, desk.claims()) == (0, NO_CLAIMS)
    assert desk.dispatcher.counters.get(REQUESTS, "finished") == 1
    assert desk.handle(ChoiceStopped(request_id, 1)) == []


def test_a_client_that_has_gone_costs_nothing_more() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit()
    actions = desk.handle(ClientGone(request_id))
    assert {worker for worker, _ in sent(AbortSequence, actions)} == {"p0", "d0"}
    assert events_of(actions) == []
    assert (desk.dispatcher.num_open, desk.claims()) == (0, NO_CLAIMS)
    assert desk.handle(ClientGone(request_id)) == []
    assert desk.emit("p0", request_id, 0) == []
    assert desk.dispatcher.counters.get(REQUESTS, "aborted") == 1


def test_a_lost_prefill_worker_whose_part_is_done_is_not_missed() -> None:
    desk = Desk().with_pair()
    request_id, _ = desk.submit(max_tokens=2)
    desk.emit("p0", request_id, 0)
    assert events_of(desk.lose("p0")) == []
    assert tokens_of(desk.emit("d0", request_id, 1)) == [1]
    assert desk.dispatcher.num_open == 0
    assert desk.claims() == {"d0": (0, 0)}


def test_a_choice_that_ended_does_not_die_with_its_worker() -> None:
    desk = Desk().with_pair()
    desk.register(card("d1", Role.DECODE))
    desk.pair("p0", "d1")
    request_id, actions = desk.submit(num_prompt=4, max_tokens=1, num_choices=2)
    decoders = [worker for worker, message in sent(StartSequence, actions) if message.task is Task.DECODE]
    assert sorted(decoders) == ["d0", "d1"]
    desk.emit("p0", request_id, 0, choice=0)
    assert events_of(desk.lose(decoders[0])) == []
    assert desk.dispatcher.num_open == 1


@pytest.mark.parametrize("kind", FailureKind)
def test_what_no_move_cures_is_the_clients_fault_or_worth_another_try(kind: FailureKind) -> None:
    made = error_of(Failure(kind, "because"), Recovery(Verdict.GIVE_UP, "attempt 3 of 3 failed: because"))
    if kind is FailureKind.INVALID_REQUEST:
        assert type(made) is InvalidRequest
        assert str(made) == "because"
    else:
        assert isinstance(made, Unavailable)
        assert type(made) is Unavailable
        assert (str(made), made.retry_after_s) == ("attempt 3 of 3 failed: because", RETRY_AFTER_S)
