"""Timelines laid out from tracks: each case of who brought a token, and who has said what."""

import math
from typing import Any

import pytest

from disagg.core.errors import InternalFault
from disagg.core.ids import WorkerId
from disagg.telemetry.stages import Stage, StageTime
from disagg.telemetry.timeline import ChoiceTimeline, Part, lay_out
from disagg.telemetry.track import MAX_REPORTS, Head, RequestTrack, TrackStore, Trip

P, D, OTHER = WorkerId("p"), WorkerId("d"), WorkerId("d2")
REMOTE = Trip(1, "remote", "long_prompt", is_fallback=False, decode=D, prefill=P, transport="tcp")
LOCAL = Trip(1, "local", "no_prefill_worker", is_fallback=True, decode=D)

Row = tuple[Part, Stage, Any]


def spent(*stages: tuple[Stage, float]) -> tuple[StageTime, ...]:
    return tuple(StageTime(stage, seconds) for stage, seconds in stages)


def request() -> RequestTrack:
    """Received at 100, submitted at 101."""
    marks = ((Stage.RECEIVE, 100.25), (Stage.ROUTER_QUEUE, 100.5), (Stage.TOKENISE, 101.0))
    track = RequestTrack(Head(100.0, marks=marks), 1)
    track.name = "1-1"
    return track


HEAD: list[Row] = [
    (Part.TTFT, Stage.RECEIVE, 0.25),
    (Part.TTFT, Stage.ROUTER_QUEUE, 0.25),
    (Part.TTFT, Stage.TOKENISE, 0.5),
]


def laid(track: RequestTrack) -> ChoiceTimeline:
    track.check_invariants()
    (choice,) = lay_out(track).choices
    choice.check_invariants()
    return choice


def rows(choice: ChoiceTimeline) -> list[Row]:
    return [(each.part, each.stage, pytest.approx(each.seconds)) for each in choice.stages]


def remote() -> RequestTrack:
    """Workers told at 102; the first token at 110, the second at 114; the answer ended at 120."""
    track = request()
    choice = track.choices[0]
    choice.place(REMOTE, 102.0)
    choice.report(1, P, 0, spent((Stage.PREFILL_QUEUE, 2.0), (Stage.RESERVATION, 1.0), (Stage.PREFILL, 4.0)))
    choice.arrive(P, 0, 1, 110.0)
    choice.report(1, D, 0, spent((Stage.PREFILL_ELSEWHERE, 7.5), (Stage.TRANSFER, 1.0)))
    choice.report(1, D, 1, spent((Stage.DECODE_QUEUE, 0.5), (Stage.FIRST_STEP, 1.5)))
    choice.arrive(D, 1, 1, 114.0)
    choice.end("finished", 9, 120.0)
    return track


def test_a_remote_request() -> None:
    choice = laid(remote())
    assert rows(choice) == [
        *HEAD,
        (Part.TTFT, Stage.ROUTER_QUEUE, 1.0),
        (Part.TTFT, Stage.PREFILL_QUEUE, 2.0),
        (Part.TTFT, Stage.RESERVATION, 1.0),
        (Part.TTFT, Stage.PREFILL, 4.0),
        (Part.TTFT, Stage.NETWORK_PREFILL, 1.0),
        (Part.FIRST_GAP, Stage.TRANSFER, 1.0),
        (Part.FIRST_GAP, Stage.DECODE_QUEUE, 0.5),
        (Part.FIRST_GAP, Stage.FIRST_STEP, 1.5),
        (Part.FIRST_GAP, Stage.NETWORK_DECODE, 1.0),
        (Part.STREAM, Stage.STREAM, 6.0),
    ]
    assert (choice.ttft_s, choice.first_gap_s, choice.total_s) == (10.0, 4.0, 20.0)
    assert (choice.transport, choice.fallback_reason, choice.num_output_tokens) == ("tcp", "", 9)
    assert {each.worker for each in choice.stages if each.stage is Stage.NETWORK_PREFILL} == {P}


def test_writing_comes_off_the_time_to_the_next_token() -> None:
    track = remote()
    track.choices[0].write(111.0)
    track.choices[0].write(114.25)
    choice = laid(track)
    assert (choice.ttft_s, choice.first_gap_s) == (11.0, 3.25)
    assert choice.seconds(Part.TTFT, Stage.WRITE) == 1.0
    assert choice.seconds(Part.FIRST_GAP, Stage.WRITE) == 0.25
    assert choice.seconds(Part.FIRST_GAP, Stage.NETWORK_DECODE) == 0.0


def test_what_was_over_before_the_client_waited_is_overlap() -> None:
    track = remote()
    track.choices[0].write(111.5)
    choice = laid(track)
    assert (choice.first_gap_s, choice.overlap_s) == (2.5, 0.5)
    assert choice.seconds(Part.FIRST_GAP, Stage.TRANSFER) == 0.5


def test_a_second_token_that_is_here_before_the_first_is_written_costs_only_its_writing() -> None:
    track = remote()
    track.choices[0].write(115.0)
    track.choices[0].write(116.0)
    choice = laid(track)
    assert [(each.stage, each.seconds) for each in choice.stages if each.part is Part.FIRST_GAP] == [(Stage.WRITE, 1.0)]


def test_text_that_waits_for_later_tokens_is_held_until_it_may_go_out() -> None:
    track = remote()
    front = track.choices[0]
    for released_s in (113.0, 117.0):
        front.release(released_s)
        front.write(released_s + 0.5)
    choice = laid(track)
    assert (choice.ttft_s, choice.first_gap_s) == (13.5, 4.0)
    assert [choice.seconds(part, Stage.HELD) for part in (Part.TTFT, Part.FIRST_GAP)] == [3.0, 3.0]
    assert [choice.seconds(part, Stage.WRITE) for part in (Part.TTFT, Part.FIRST_GAP)] == [0.5, 0.5]


def test_the_decode_worker_may_bring_the_first_token_too() -> None:
    """Its word stands where nobody says more, else the prefill worker's own."""
    for is_reported in (False, True):
        track = request()
        choice = track.choices[0]
        choice.place(REMOTE, 102.0)
        if is_reported:
            choice.report(1, P, 0, spent((Stage.PREFILL_QUEUE, 2.0), (Stage.PREFILL, 4.0)))
        choice.report(1, D, 0, spent((Stage.PREFILL_ELSEWHERE, 6.5), (Stage.TRANSFER, 0.5)))
        choice.arrive(D, 0, 1, 110.0)
        choice.report(1, D, 1, spent((Stage.DECODE_QUEUE, 0.5), (Stage.FIRST_STEP, 1.0)))
        choice.arrive(D, 1, 1, 111.5)
        read = [(Stage.PREFILL_QUEUE, 2.0), (Stage.PREFILL, 4.0)] if is_reported else [(Stage.PREFILL_ELSEWHERE, 6.5)]
        rest = 1.5 if is_reported else 1.0
        found = [(each.stage, each.seconds) for each in laid(track).stages[4:]]
        assert found == [
            *read,
            (Stage.TRANSFER, 0.5),
            (Stage.NETWORK_DECODE, rest),
            (Stage.DECODE_QUEUE, 0.5),
            (Stage.FIRST_STEP, 1.0),
        ]


def test_a_lost_attempt_before_the_first_token() -> None:
    track = request()
    choice = track.choices[0]
    choice.place(REMOTE, 102.0)
    choice.leave("worker_lost", 105.0)
    choice.place(Trip(2, "local", "no_prefill_worker", is_fallback=True, decode=OTHER), 106.0)
    choice.report(2, OTHER, 0, spent((Stage.PREFILL_QUEUE, 1.0), (Stage.PREFILL, 2.0)))
    choice.arrive(OTHER, 0, 1, 110.0)
    found = laid(track)
    assert rows(found)[3:] == [
        (Part.TTFT, Stage.ROUTER_QUEUE, 1.0),
        (Part.TTFT, Stage.LOST, 3.0),
        (Part.TTFT, Stage.ROUTER_QUEUE, 1.0),
        (Part.TTFT, Stage.PREFILL_QUEUE, 1.0),
        (Part.TTFT, Stage.PREFILL, 2.0),
        (Part.TTFT, Stage.NETWORK_DECODE, 1.0),
    ]
    assert (found.num_attempts, found.moves, found.fallback_reason) == (2, ("worker_lost",), "no_prefill_worker")
    assert found.first_gap_s is None


def test_a_lost_attempt_between_the_first_tokens() -> None:
    track = request()
    choice = track.choices[0]
    choice.place(LOCAL, 102.0)
    choice.report(1, D, 0, spent((Stage.PREFILL, 2.0)))
    choice.arrive(D, 0, 1, 105.0)
    choice.leave("worker_lost", 107.0)
    choice.place(Trip(2, "local", "short_prompt", is_fallback=False, decode=OTHER), 107.0)
    choice.report(2, OTHER, 1, spent((Stage.PREFILL, 1.5)))
    choice.arrive(OTHER, 1, 1, 109.0)
    assert rows(laid(track))[6:] == [
        (Part.FIRST_GAP, Stage.LOST, 2.0),
        (Part.FIRST_GAP, Stage.PREFILL, 1.5),
        (Part.FIRST_GAP, Stage.NETWORK_DECODE, 0.5),
    ]


def test_a_late_token_of_an_attempt_that_was_left_is_that_attempts() -> None:
    track = request()
    choice = track.choices[0]
    choice.place(LOCAL, 101.0)
    choice.leave("drain", 104.0)
    choice.place(Trip(2, "local", "short_prompt", is_fallback=False, decode=D), 104.0)
    choice.report(1, D, 0, spent((Stage.PREFILL, 3.0)))
    choice.arrive(D, 0, 1, 105.0)
    assert rows(laid(track))[3:] == [(Part.TTFT, Stage.PREFILL, 3.0), (Part.TTFT, Stage.NETWORK_DECODE, 1.0)]


def test_time_of_workers_that_say_nothing_is_not_the_networks() -> None:
    track = request()
    track.choices[0].place(LOCAL, 102.0)
    track.choices[0].arrive(D, 0, 2, 105.0)
    choice = laid(track)
    assert rows(choice)[4:] == [(Part.TTFT, Stage.UNREPORTED, 3.0)]
    assert choice.first_gap_s == 0.0  # both came together


def test_a_request_that_never_got_a_token() -> None:
    waiting, placed = request(), request()
    waiting.choices[0].end("failed", 0, 103.0)
    placed.choices[0].place(REMOTE, 102.0)
    placed.choices[0].end("aborted", 0, 104.0)
    assert rows(laid(waiting)) == [*HEAD, (Part.TTFT, Stage.ROUTER_QUEUE, 2.0)]
    assert rows(laid(placed))[3:] == [(Part.TTFT, Stage.ROUTER_QUEUE, 1.0), (Part.TTFT, Stage.LOST, 2.0)]
    assert (laid(placed).ttft_s, laid(placed).outcome, laid(placed).total_s) == (None, "aborted", 4.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -5.0, 1e300])
def test_what_is_no_duration_breaks_nothing(seconds: float) -> None:
    track = request()
    track.choices[0].place(LOCAL, 102.0)
    track.choices[0].report(1, D, 0, spent((Stage.PREFILL_QUEUE, seconds), (Stage.PREFILL, 1.0)))
    track.choices[0].arrive(D, 0, 1, 105.0)
    assert laid(track).ttft_s == 5.0


def test_a_track_is_bounded() -> None:
    choice = request().choices[0]
    choice.place(LOCAL, 102.0)
    for position in range(1000):
        choice.report(1, D, position, spent((Stage.PREFILL, 1.0)))
        choice.arrive(D, position, 1, 105.0)
        choice.write(105.0)
    assert (len(choice.reports), len(choice.arrivals), len(choice.written_s)) == (MAX_REPORTS, 2, 2)
    choice.check_invariants()


def test_a_hole_in_a_timeline_is_found() -> None:
    choice = laid(remote())
    for broken in (choice.stages[:3] + choice.stages[4:], choice.stages[:-2], (*choice.stages[:1], *choice.stages)):
        timeline = lay_out(remote()).choices[0]
        fields = {name: getattr(timeline, name) for name in timeline.__struct_fields__}
        with pytest.raises(InternalFault):
            ChoiceTimeline(**{**fields, "stages": broken}).check_invariants()


def test_the_store_keeps_the_last_and_shows_each_tenant_its_own() -> None:
    store = TrackStore(3)
    for number in range(5):
        track = RequestTrack(Head(100.0, tenant="a" if number % 2 else "b"), 1)
        track.name = f"1-{number}"
        store.put(track)
        store.check_invariants()
    assert len(store) == 3
    assert [each.name for each in store.last(10, "b")] == ["1-4", "1-2"]
    assert [each.name for each in store.last(1, "b")] == ["1-4"]
    assert store.get("1-3", "a") is not None
    assert store.get("1-3", "b") is None
    assert store.get("1-1", "a") is None
