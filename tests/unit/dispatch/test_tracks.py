"""What the dispatcher notes of a timed request, and tells workers of it."""

from tests.unit.dispatch.rigs import MODEL, Desk, card, sent

from disagg.core.ids import HandoffId, RequestId, SequenceId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.events import ClientGone
from disagg.dispatch.stream import GenerateRequest
from disagg.protocol.messages import EmitTokens, PromptReport, StageReport, StartSequence
from disagg.telemetry.stages import Stage, StageTime
from disagg.telemetry.timeline import Part, lay_out
from disagg.telemetry.track import Head, RequestTrack


def submit(desk: Desk, num_choices: int = 1, max_tokens: int = 4) -> tuple[RequestId, RequestTrack, bool]:
    """The request, its track, and whether workers were told that it is timed."""
    track = RequestTrack(Head(desk.now_s), num_choices)
    request = GenerateRequest(MODEL, tuple(range(10)), SamplingParams(max_tokens), num_choices)
    request_id, actions = desk.dispatcher.submit(request, desk.now_s, track)
    told = [message.is_timed for _, message in sent(StartSequence, actions)]
    assert len(set(told)) == 1
    return request_id, track, told[0]


def say(desk: Desk, name: str, request_id: RequestId, position: int, *stages: StageTime, attempt: int = 1) -> None:
    sequence_id = SequenceId(request_id, 0)
    report = StageReport(HandoffId(sequence_id, attempt), position, stages)
    desk.hear(name, EmitTokens((EmittedToken(sequence_id, position, 9),), (), (report,)))


def test_a_remote_request_from_end_to_end() -> None:
    desk = Desk().with_pair()
    request_id, track, is_timed = submit(desk)
    assert is_timed
    assert track.name == str(request_id)
    desk.now_s += 2.0
    prompt = PromptReport(HandoffId(SequenceId(request_id, 0), 1), 4, 6, 1000, 600, 0.5)
    desk.hear("p0", EmitTokens((), (prompt,)))
    say(desk, "p0", request_id, 0, StageTime(Stage.PREFILL, 1.5))
    desk.now_s += 0.5
    say(desk, "d0", request_id, 0, StageTime(Stage.PREFILL_ELSEWHERE, 1.75), StageTime(Stage.TRANSFER, 0.25))
    desk.now_s += 0.5
    say(desk, "d0", request_id, 1, StageTime(Stage.FIRST_STEP, 0.5))
    desk.now_s += 1.0
    desk.emit("d0", request_id, 2)
    desk.emit("d0", request_id, 3)
    (choice,) = lay_out(track).choices
    choice.check_invariants()
    assert (choice.outcome, choice.path, choice.placement_reason) == ("finished", "remote", "long_prompt")
    assert (choice.transport, choice.prefill_worker, choice.decode_worker) == ("in_process", "p0", "d0")
    assert (choice.num_cached_tokens, choice.handoff_bytes, choice.hidden_bytes) == (4, 1000, 600)
    assert (choice.ttft_s, choice.first_gap_s, choice.total_s) == (2.0, 1.0, 4.0)
    assert (choice.hidden_transfer_s, choice.num_output_tokens) == (0.5, 4)
    assert choice.seconds(Part.TTFT, Stage.NETWORK_PREFILL) == 0.5
    assert choice.seconds(Part.FIRST_GAP, Stage.NETWORK_DECODE) == 0.25


def test_fallbacks_and_moves_are_told() -> None:
    desk = Desk()
    desk.register(card("d0", Role.DECODE))
    desk.register(card("d1", Role.DECODE))
    desk.register(card("m0", Role.MIXED, num_blocks=1))
    request_id, track, _ = submit(desk)
    (first,) = desk.choice(request_id).workers
    desk.now_s += 1.0
    desk.lose(first)
    desk.now_s += 1.0
    (second,) = desk.choice(request_id).workers
    say(desk, second, request_id, 0, StageTime(Stage.PREFILL, 0.75), attempt=2)
    desk.handle(ClientGone(request_id))
    (choice,) = lay_out(track).choices
    choice.check_invariants()
    assert (choice.outcome, choice.num_attempts, choice.moves) == ("aborted", 2, ("worker_lost",))
    assert choice.seconds(Part.TTFT, Stage.LOST) == 1.0
    assert choice.fallback_reason in ("", "no_prefill_worker")
    assert (choice.fallback_reason == "no_prefill_worker") == (choice.path == "local")


def test_reports_of_strangers_and_of_ended_requests_are_not_believed() -> None:
    desk = Desk().with_pair()
    desk.register(card("d1", Role.DECODE))
    request_id, track, _ = submit(desk)
    say(desk, "d1" if "d0" in desk.choice(request_id).workers else "d0", request_id, 0, StageTime(Stage.PREFILL, 9.0))
    assert track.choices[0].reports == {}
    desk.handle(ClientGone(request_id))
    say(desk, "p0", request_id, 0, StageTime(Stage.PREFILL, 9.0))
    assert track.choices[0].reports == {}


def test_choices_that_wait_for_a_prompt_queue_at_the_router() -> None:
    desk = Desk().with_pair()
    request_id, track, _ = submit(desk, num_choices=2)
    assert [len(choice.attempts) for choice in track.choices] == [1, 0]
    desk.now_s += 3.0
    say(desk, "d0", request_id, 0, StageTime(Stage.PREFILL_ELSEWHERE, 2.5), StageTime(Stage.TRANSFER, 0.25))
    assert [len(choice.attempts) for choice in track.choices] == [1, 1]
    desk.handle(ClientGone(request_id))
    follower = lay_out(track).choices[1]
    assert (follower.seconds(Part.TTFT, Stage.ROUTER_QUEUE), follower.path) == (3.0, "local")


def test_nobody_is_timed_without_a_track() -> None:
    desk = Desk().with_pair()
    request_id, actions = desk.submit()
    assert [message.is_timed for _, message in sent(StartSequence, actions)] == [False, False]
    assert desk.choice(request_id).track is None
