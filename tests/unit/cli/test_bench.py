"""`disagg bench` from its command line: what cannot work is one plain line; a run leaves what was asked for."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.bench.rigs import record

from disagg.bench.record import read_records
from disagg.bench.search import RateSearch, Trial
from disagg.cli import launch
from disagg.cli.bench_options import CompareOptions, LoadOptions, PhasesOptions, ReportOptions
from disagg.cli.bench_phases import Limits, Phase, describe, phases_of, shape_of
from disagg.cli.bench_run import limit_sentence, load_in_words, num_expected, plan_of
from disagg.cli.main import main
from disagg.core.formats import Weights
from disagg.testing.processes import MarkedProcess


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", "bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def url() -> Iterator[str]:
    arguments = ("--ttft-s", "0.02", "--gap-s", "0.005")
    with MarkedProcess(arguments, program=(sys.executable, "-m", "disagg.testing.openai_server")) as process:
        found = re.search(r"http://\S+", process.wait_line("is ready at", 60.0))
        assert found is not None
        yield found[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "no scenario 'nonsense': name one of chat, code, rag"),
        (("http://127.0.0.1:9",), "give --rate (open loop), --clients (closed loop)"),
        (("http://127.0.0.1:9", "--rate", "1", "--arrivals", "x"), "'x' is not one of poisson, gamma, even"),
        (("http://127.0.0.1:9", "--rate", "1", "--api", "x"), "'x' is not one of chat, text, ids"),
        (("http://127.0.0.1:9", "--rate", "-1"), "--rate is -1: it must be at least 0"),
        (("http://127.0.0.1:9", "--rate", "1"), "is it up?"),
        (("http://127.0.0.1:x", "--rate", "1"), "a port that is no number"),
        (("http://127.0.0.1:9", "--rate", "1", "--report", "/no/such/x.html"), "/no/such is not a folder"),
        (("http://127.0.0.1:9", "--trace", "/no/such"), "no trace file /no/such"),
        (("http://127.0.0.1:9", "--clients", "2", "--search"), "--search changes the rate"),
        (("compare", "--prefill", "0"), "a comparison needs at least one of each"),
        (("compare", "--rates", "1,x"), "give factors such as"),
        (("compare", "--rates", "0"), "all must be above 0"),
        (("phases", "--output-tokens", "1"), "--output-tokens 2 or more"),
    ],
)
def test_what_cannot_work_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_run_leaves_figures_records_and_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    page, records = tmp_path / "page.html", tmp_path / "records.jsonl"
    asked = ("--rate", "100", "--requests", "30", "--output-tokens", "4", "--warm-up", "5", "--json")
    assert run(monkeypatch, url, *asked, "--report", str(page), "--records", str(records)) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert said["asked"] == f"{url}: 256 prompt and 4 answer tokens, 100 requests/s (poisson), seed 7"
    assert said["limit"] is None
    (found,) = said["loads"]
    assert (found["figures"]["num_requests"], found["figures"]["num_whole"]) == (25, 25)
    assert found["figures"]["latency"]["p50"]["value"] >= 0.0349  # the server is never early
    kept = list(read_records(records.read_bytes().splitlines()))
    assert [each.number for each in kept] == list(range(30))
    assert [each.num_output_tokens for each in kept] == [4] * 30
    assert "prefers-color-scheme: dark" in page.read_text()
    assert page.read_text().count("<svg") == 5  # four curves and the waterfall; no workers are known


def test_a_load_that_nobody_answers_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert run(monkeypatch, url, "--rate", "50", "--requests", "3", "--timeout-s", "0.005") == 1
    said = capsys.readouterr().out
    assert "3 requests counted, 0 answered whole" in said
    assert "nan" not in said


def test_a_search_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    asked = ("--rate", "50", "--requests", "20", "--output-tokens", "2", "--search", "--search-runs", "2")
    assert run(monkeypatch, url, *asked, "--ttft-s", "0.001") == 0
    assert "No rate tried attains 90 %; the lowest was" in capsys.readouterr().out


def test_a_search_leaves_its_limit_for_programs_and_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    asked = ("--rate", "50", "--requests", "20", "--output-tokens", "2", "--search", "--search-runs", "2", "--json")
    assert run(monkeypatch, url, *asked, "--ttft-s", "30", "--tpot-s", "30", "--report", str(page)) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert [load["rate_per_s"] for load in said["loads"]] == [50.0, 50.0]  # twenty of twenty prove little: once more
    assert said["limit"] == {"rate_per_s": 50.0, "first_too_high_per_s": None, "is_sure": False}
    assert "Attainment by rate" in page.read_text()


def test_flags_reach_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(launch, "run_bench", lambda *given: seen.append(given))
    monkeypatch.setattr(launch, "run_bench_compare", lambda *given: seen.append(given))
    monkeypatch.setattr(launch, "run_bench_phases", lambda asked, *, as_json: seen.append((asked, as_json)))
    assert run(monkeypatch, "run", "chat", "--rate", "3", "--mixed", "2", "--records", "r") == 0
    assert run(monkeypatch, "compare", "m", "--scenario", "rag", "--rates", "2,1", "--serve-flags", "--a b") == 0
    assert run(monkeypatch, "phases", "m", "--concurrent", "2", "--no-measure-limits", "--json") == 0
    first, second, third = seen
    assert first == (LoadOptions(target="chat", rate=3.0, mixed=2), ReportOptions(records=Path("r")))
    compared = CompareOptions(
        model="m",
        prefill=1,
        decode=1,
        mixes=("rag",),
        rates=(2.0, 1.0),
        requests=0,
        rounds=2,
        seed=7,
        timeout_s=300.0,
        serve_flags=("--a", "b"),
    )
    assert second == (compared, ReportOptions())
    assert isinstance(third, tuple)
    assert third[0].concurrent == 2
    assert not third[0].measure_limits
    assert third[1]


def test_targets_and_rates_of_a_scenario_hold_unless_others_are_given() -> None:
    mine = plan_of(LoadOptions(target="chat"))
    assert (mine.slo.ttft_s, mine.slo.tpot_s, mine.rate_per_s) == (1.0, 0.1, 0.8)
    other = plan_of(LoadOptions(target="chat", ttft_s=5.0, rate=2.0))
    assert (other.slo.ttft_s, other.slo.tpot_s, other.rate_per_s) == (5.0, 0.1, 2.0)


def test_the_sentence_of_a_search() -> None:
    search = RateSearch(1.0)
    search.trials = {1.0: Trial(1.0, 99, 100), 2.0: Trial(2.0, 10, 100)}
    assert limit_sentence(search.limit()) == "1 requests/s attain 90 %, 2/s does not."
    search.trials = {1.0: Trial(1.0, 10, 10)}
    assert "no higher one was tried" in limit_sentence(search.limit())


def test_phases_are_parted_by_the_last_first_token(smollm2_path: Path) -> None:
    asked = PhasesOptions(
        target="smollm2",
        model="smollm2",
        concurrent=2,
        prompt_tokens=100,
        output_tokens=11,
        rounds=1,
        seed=1,
        weights=Weights.FP32,
        measure_limits=False,
        timeout_s=9.0,
    )
    shape = shape_of(asked)
    assert 130e6 < shape.num_parameters < 140e6
    records = [
        record(0, 1.0, 0.1, 11, due_s=0.0, prompt=100),
        record(1, 2.0, 0.1, 11, due_s=0.0, prompt=100),
    ]
    with pytest.raises(Exception, match="ask for more"):  # one had ended before the other began
        phases_of([records[0], record(1, 5.0, 0.1, 11, due_s=0.0)], shape, asked)
    prefill, decode = phases_of([record(0, 1.55, 0.1, 11, due_s=0.0), records[1]], shape, asked)
    assert prefill.seconds == pytest.approx(1.999)
    assert prefill.num_tokens == 200
    assert prefill.flops > 2 * 200 * 106e6
    assert decode.seconds == pytest.approx(1.55 + 1.0 - 2.0)
    assert decode.num_tokens == 6 + 5
    limits = Limits(read_gb_s=10.0, gemm_gflop_s=100.0, bf16_gflop_s=100.0)
    assert Phase("x", 1.0, 1, 1e9, 1e9).bound(limits) == "bandwidth"
    assert Phase("x", 1.0, 1, 100e9, 1e9).floor_s(limits) == pytest.approx(1.0)
    assert "bound by bandwidth" in "\n".join(describe([prefill, decode], limits, asked))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (LoadOptions(target="http://x", rate=2.5), "256 prompt and 64 answer tokens, 2.5 requests/s (poisson), seed 7"),
        (LoadOptions(target="http://x", scenario="chat", seed=1), "scenario chat, 0.8 requests/s (poisson), seed 1"),
        (LoadOptions(target="code", rate=3.0), "scenario code, 3 requests/s (gamma), seed 7"),
        (LoadOptions(target="rag", clients=8), "scenario rag, 8 clients, each asks when answered, seed 7"),
        (
            LoadOptions(target="http://x", trace="/a/b.csv", trace_format="azure", rate_scale=0.1),
            "azure trace b.csv, its clock at 0.1 times, its lengths at 1 times, seed 7",
        ),
    ],
)
def test_a_page_says_what_was_asked(asked: LoadOptions, words: str) -> None:
    assert load_in_words(asked) == words


def test_progress_knows_how_many_there_will_be() -> None:
    for more in ({"rate": 1.0}, {"clients": 3}, {"trace": "x", "requests": 100}):
        plan = plan_of(LoadOptions(target="http://x", **more))
        assert num_expected(plan.workload) == 100
    assert num_expected(plan_of(LoadOptions(target="chat")).workload) == 0  # conversations end when they do
