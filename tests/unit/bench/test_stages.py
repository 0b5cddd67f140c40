"""Stages of many requests as shares, sentences and plots."""

import msgspec
import pytest
from tests.unit.bench.rigs import noisy, result
from tests.unit.telemetry.test_timeline import remote

from disagg.bench.comparison import limiting_stage
from disagg.bench.html_report import request_section
from disagg.bench.measure import LoadResult, merge
from disagg.bench.stages import in_words, stage_shares
from disagg.bench.text_report import stage_lines
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part, RequestTimeline, lay_out
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
    assert ("separate prefill", "TTFT", "4000.0", "40 %") in section.tables[0].rows


def test_a_server_without_timelines_is_reported_as_ever() -> None:
    made = result("separate", noisy(0.5, 0.05), {"prefill": 0.9})
    assert stage_lines(made) == []
    assert "TTFT" not in limiting_stage(made)
    section = request_section([made])
    assert (len(section.plots), section.tables) == (1, ())


def test_rounds_keep_all_timelines() -> None:
    assert len(merge([observed(), observed()]).observation.timelines) == 6
