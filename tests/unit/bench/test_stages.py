"""Stages of many requests as shares, sentences and plots."""

from typing import cast

import msgspec
import pytest
from tests.unit.bench.rigs import noisy, result
from tests.unit.telemetry.test_timeline import remote

from disagg.bench.comparison import limiting_stage
from disagg.bench.html_report import request_section
from disagg.bench.http_client import HttpClient
from disagg.bench.json_report import load_report
from disagg.bench.measure import LoadResult, merge
from disagg.bench.observation import Observer
from disagg.bench.stages import in_words, stage_shares
from disagg.bench.text_report import stage_lines
from disagg.core.ids import WorkerId
from disagg.telemetry.stages import Stage, StageTime
from disagg.telemetry.timeline import Part, RequestTimeline, TimelineAnswer, lay_out
from disagg.telemetry.track import Head, RequestTrack


def answered() -> RequestTimeline:
    return lay_out(remote())


def unanswered() -> RequestTimeline:
    track = RequestTrack(Head(100.0), 1)
    track.choices[0].end("failed", 0, 150.0)
    return lay_out(track)


def observed() -> LoadResult:
    made = result("separate", noisy(0.5, 0.05), {"prefill": 0.9, "decode": 0.2})
    observation = msgspec.structs.replace(made.observation, timelines=(answered(), answered(), unanswered()))
    return msgspec.structs.replace(made, observation=observation)


def test_shares_are_of_the_requests_that_got_the_token() -> None:
    shares = stage_shares([answered(), answered(), unanswered()], Part.TTFT)
    assert [each.stage for each in shares[:2]] == [Stage.PREFILL, Stage.PREFILL_QUEUE]
    assert sum(each.share for each in shares) == pytest.approx(1.0)
    assert sum(each.mean_s for each in shares) == pytest.approx(10.0)
    assert shares[0].share == pytest.approx(0.4)
    assert stage_shares([unanswered()], Part.FIRST_GAP) == stage_shares([], Part.TTFT) == ()
    assert in_words(shares).startswith("prefill 40 %, prefill_queue 20 %, ")


def test_reports_say_where_the_time_went() -> None:
    lines = stage_lines(observed())
    assert [line.split(":")[0] for line in lines] == ["TTFT by stage", "first gap by stage"]
    assert "first_step 38 %" in lines[1]
    assert limiting_stage(observed()).endswith("decode 20 %; 40 % of TTFT is prefill)")
    section = request_section([observed()])
    assert len(section.plots) == 2
    assert "Stages of requests, separate" in section.plots[1]
    assert ("separate prefill", "4000.0", "40 %", "", "") in section.tables[0].rows
    assert "separate first step" in [row[0] for row in section.tables[0].rows]


def test_programs_are_told_the_same() -> None:
    said = msgspec.json.decode(msgspec.json.encode(load_report(observed())))
    assert said["ttft_stages"][0] == {"stage": "prefill", "mean_s": 4.0, "share": 0.4}
    assert sum(each["share"] for each in said["first_gap_stages"]) == pytest.approx(1.0)
    assert said["busy_by_role"] == {"prefill": 0.9, "decode": 0.2}


def test_a_hand_off_limits_where_nobody_is_busy_and_answers_wait_for_kv() -> None:
    track = remote()
    slow = track.choices[0]
    slow.reports[1, WorkerId("d"), 0] = (StageTime(Stage.PREFILL_ELSEWHERE, 7.5), StageTime(Stage.TRANSFER, 2.0))
    for busy, said in (
        (0.2, "hand-off (50 % of the first gap is transfer; prefill workers computed 20 %"),
        (0.9, "prefill (computing 90 %"),
    ):
        made = result("separate", noisy(0.5, 0.05), {"prefill": busy, "decode": 0.1})
        observation = msgspec.structs.replace(made.observation, timelines=(lay_out(track),))
        assert limiting_stage(msgspec.structs.replace(made, observation=observation)).startswith(said)
    assert limiting_stage(result("separate", noisy(0.5, 0.05), {"prefill": 0.2})).startswith("none: ")


def test_a_server_without_timelines_is_reported_as_ever() -> None:
    made = result("separate", noisy(0.5, 0.05), {"prefill": 0.9})
    assert stage_lines(made) == []
    assert "TTFT" not in limiting_stage(made)
    section = request_section([made])
    assert (len(section.plots), section.tables) == (1, ())


def test_rounds_keep_all_timelines() -> None:
    assert len(merge([observed(), observed()]).observation.timelines) == 6


class ServerWithTimelines:
    """Answers an observer; each look finds more requests ended."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def get(self, path: str, *, at_root: bool = False) -> tuple[int, bytes]:
        self.asked.append(path)
        if not path.startswith("/timeline"):
            return 404, b""
        return 200, self._answers.pop(0)


def listed(*names: str) -> bytes:
    named = [msgspec.structs.replace(answered(), request_id=name) for name in names]
    return msgspec.json.encode(TimelineAnswer(tuple(named)))


async def test_an_observer_takes_the_requests_of_its_load_alone() -> None:
    server = ServerWithTimelines(listed("2", "1"), listed("4", "3", "2"))
    async with Observer(cast(HttpClient, server), lambda: 0.0) as observer:
        pass
    assert [each.request_id for each in observer.observation().timelines] == ["3", "4"]
    assert server.asked.count("/metrics") == 2


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"timelines":[{}]}', b"<html>"])
async def test_an_observer_makes_do_with_servers_that_say_something_else(answer: bytes) -> None:
    async with Observer(cast(HttpClient, ServerWithTimelines(answer, answer)), lambda: 0.0) as observer:
        pass
    assert observer.observation().timelines == ()
