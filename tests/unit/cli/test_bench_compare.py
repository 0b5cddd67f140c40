"""`disagg bench compare` over servers that are not there: who is asked for what, in which order, what is made of it."""

import re
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from tests.unit.bench.rigs import noisy, result

from disagg.bench.measure import LoadPlan, LoadResult, OnRecord, Target
from disagg.bench.record import read_records
from disagg.cli import bench_compare
from disagg.cli.bench_compare import run_compare
from disagg.cli.bench_options import CompareOptions, ReportOptions
from disagg.core.errors import ConfigurationError

ASKED = CompareOptions(
    model="m",
    prefill=2,
    decode=1,
    mixes=("chat", "rag"),
    rates=(1.0, 0.5),
    requests=6,
    rounds=2,
    seed=3,
    timeout_s=9.0,
    serve_flags=("--more",),
)
MIXED = ("m", "--mixed", "3", "--more")
SEPARATE = ("m", "--prefill", "2", "--decode", "1", "--more")


class Clusters:
    """Stands for `disagg serve` and for what is measured of it: separate workers take half as long."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, LoadPlan]] = []
        self.up: list[tuple[str, ...]] = []

    def serve(self, arguments: tuple[str, ...], *, ready_timeout_s: float) -> "_Server":
        return _Server(self, arguments)

    def measure(self, target: Target, plan: LoadPlan, on_record: OnRecord = lambda record: None) -> LoadResult:
        assert sorted(self.up) == sorted((MIXED, SEPARATE))  # both, all the time
        self.loads.append((target.url, plan))
        slow = "mixed" in target.url
        records = noisy(0.8 if slow else 0.4, 0.04, num=12, seed=plan.seed)
        for record in records:
            on_record(record)
        made = result(plan.label, records, {"mixed": 0.9} if slow else {"prefill": 0.8, "decode": 0.3})
        return msgspec.structs.replace(made, rate_per_s=plan.rate_per_s)


class _Server:
    def __init__(self, clusters: Clusters, arguments: tuple[str, ...]) -> None:
        self._clusters = clusters
        self._arguments = arguments
        self.url = "http://mixed" if "--mixed" in arguments else "http://separate"

    def __enter__(self) -> Self:
        self._clusters.up.append(self._arguments)
        return self

    def __exit__(self, *error: object) -> None:
        self._clusters.up.remove(self._arguments)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    made = Clusters()
    monkeypatch.setattr(bench_compare, "Serve", made.serve)
    monkeypatch.setattr(bench_compare, "measure", made.measure)
    return made


def test_both_sides_are_asked_for_the_same_in_turn(clusters: Clusters) -> None:
    run_compare(ASKED, ReportOptions())
    assert clusters.up == []
    warm, loads = clusters.loads[:2], clusters.loads[2:]
    assert [url for url, _ in warm] == ["http://mixed", "http://separate"]
    pairs = list(zip(loads[::2], loads[1::2], strict=True))
    assert len(pairs) == 2 * 2 * 2  # scenarios, rounds, rates
    first = [one[0].removeprefix("http://") for one, _ in pairs]
    assert first == ["mixed", "mixed", "separate", "separate"] * 2
    for (one_url, one), (other_url, other) in pairs:
        assert {one_url, other_url} == {"http://mixed", "http://separate"}
        assert msgspec.structs.replace(one, label="") == msgspec.structs.replace(other, label="")
    # No run has another's words, nor those of the warm-up; rounds have other lengths and times.
    assert len({plan.prompt_seed for _, plan in (*warm[:1], *loads[::2])}) == 9
    assert {plan.seed for _, plan in loads} == {3, 103}


def test_a_sentence_for_each_scenario_and_all_that_was_asked_for(
    clusters: Clusters, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, records = tmp_path / "page.html", tmp_path / "records.jsonl"
    run_compare(ASKED, ReportOptions(html=page, records=records))
    said = capsys.readouterr().out
    assert said.startswith("m: 2 prefill + 1 decode workers beside 3 mixed ones on the same machine, 2 rounds in turn")
    sentences = said.strip().split("\n")[-3::2]
    for name, sentence in zip(("chat", "rag"), sentences, strict=True):
        assert sentence.startswith(f"{name}: separate workers win: ")
        assert "answers end no later on separate workers at every prompt length tried" in sentence
        assert re.search(
            r"what limits separate workers: prefill \(computing \d+ % of the time; decode \d+ %\)\.$", sentence
        )
    assert len(list(read_records(records.read_bytes().splitlines()))) == 2 * 2 * 2 * 2 * 12
    text = page.read_text()
    assert all(sentence in text for sentence in sentences)
    assert text.count("Attainment by rate") == 2 * 2  # title and label
    assert "Busy workers, separate" in text
    titles = re.findall("<h2>(.+?):", text)
    assert titles == ["chat"] * 5 + ["rag"] * 5


def test_programs_are_told_the_same(clusters: Clusters, capsys: pytest.CaptureFixture[str]) -> None:
    run_compare(ASKED, ReportOptions(as_json=True))
    said: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    assert said["asked"].startswith("m: 2 prefill + 1 decode workers")
    assert [each["scenario"] for each in said["scenarios"]] == ["chat", "rag"]
    for each in said["scenarios"]:
        assert each["verdict"]["winner"] == "separate"
        assert each["verdict"]["limiting_mixed"].startswith("mixed (computing ")
        assert [load["figures"]["num_requests"] for load in each["mixed"]] == [24, 24]  # both rounds
        assert each["separate"][0]["busy_by_role"]["prefill"] > each["separate"][0]["busy_by_role"]["decode"]
        assert (each["separate"][0]["hidden_share"], each["separate"][0]["ttft_stages"]) == (0.9, [])


@pytest.mark.parametrize("more", [{"requests": -1}, {"timeout_s": 0.0}, {"rounds": 0}, {"rates": ()}, {"decode": 0}])
def test_what_cannot_be_compared_is_refused_before_anything_starts(clusters: Clusters, more: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        run_compare(msgspec.structs.replace(ASKED, **more), ReportOptions())
    assert clusters.loads == []
