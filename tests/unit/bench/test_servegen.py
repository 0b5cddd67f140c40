"""Requests drawn from ServeGen's folders: as many as the rates say, as bursty, as long; every fault by its file."""

import itertools
import math
import os
import random
import statistics
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.bench.servegen import read_clients
from disagg.bench.traces import TraceWork
from disagg.bench.workload import WorkRequest
from disagg.core.errors import ConfigurationError

WINDOW_S = 600
DATASET = """{
  "0": {"input_tokens": "{}", "output_tokens": "{}"},
  "1200": {"input_tokens": "{100: 0.75, 200: 0.25}", "output_tokens": "{0: 0.5, 7: 0.5}", "reason_ratio": "{0.5: 1.0}"},
  "3000": {"input_tokens": "{4000: 1.0}", "output_tokens": "{9: 1.0}"}
}"""
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(*clients: tuple[str, str]) -> Path:
        """(trace, data set) of clients 1, 2, ..."""
        for number, (trace, dataset) in enumerate(clients, 1):
            (tmp_path / f"chunk-{number}-trace.csv").write_text(trace)
            (tmp_path / f"chunk-{number}-dataset.json").write_text(dataset)
        return tmp_path

    return make


def windows(*said: str) -> str:
    """What is said of each window after its start; "": nothing is asked."""
    rows = enumerate(said)
    return "\n".join(f"{WINDOW_S * place},{text or '0,0,,0,0'}" for place, text in rows) + "\n"


def drawn(folder: Path, seed: int = 0, **more: float) -> list[WorkRequest]:
    stream = TraceWork(path=folder, format="servegen", **more).start(random.Random(seed))  # type: ignore[arg-type]
    return list(iter(stream.next_request, None))


def gap_cv(times_s: list[float]) -> float:
    gaps = [later - one for one, later in itertools.pairwise(times_s)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_windows_are_filled_at_their_rates_and_the_clock_begins_with_the_first(make_folder: MakeFolder) -> None:
    trace = windows("", "", "0.5,1.0,Gamma,1.0,2.0", "", "1.0,1.0,Weibull,1.0,1.0")
    requests = drawn(make_folder((trace, DATASET)))
    times = [request.due_s for request in requests]
    assert times == sorted(times)
    assert [request.number for request in requests] == list(range(len(requests)))
    by_window = [sum(WINDOW_S * place <= at_s < WINDOW_S * (place + 1) for at_s in times) for place in range(3)]
    assert by_window == [300, 0, 600]  # the last window is as long as the one before


def test_part_of_a_request_comes_as_often_as_it_should(make_folder: MakeFolder) -> None:
    folder = make_folder((windows("0.0025,1.0,Gamma,1.0,400.0"), DATASET))  # one and a half in a window
    counts = []
    for seed in range(40):
        try:
            counts.append(len(drawn(folder, seed)))
        except ConfigurationError:
            counts.append(0)
    assert set(counts) == {1, 2}
    assert 0.3 < counts.count(2) / len(counts) < 0.7


@pytest.mark.parametrize(
    ("gaps", "cv"),
    [("Gamma,1.0,1.0", 1.0), ("Gamma,0.25,4.0", 2.0), ("Gamma,25.0,0.04", 0.2), ("Weibull,0.5,1.0", math.sqrt(5))],
)
def test_gaps_are_as_bursty_as_said(make_folder: MakeFolder, gaps: str, cv: float) -> None:
    requests = drawn(make_folder((windows(f"10.0,{cv},{gaps}"), DATASET)))
    assert len(requests) == 6000
    assert gap_cv([request.due_s for request in requests]) == pytest.approx(cv, rel=0.1)


def test_bursts_do_not_all_come_with_the_window(make_folder: MakeFolder) -> None:
    """Of very bursty clients a window has one burst each: at any time of it."""
    clients = [(windows("0.05,9.0,Gamma,0.0123,1600"), DATASET)] * 60
    firsts = [request.due_s for request in drawn(make_folder(*clients))]
    assert len(firsts) == 60 * 30
    early = sum(at_s < WINDOW_S / 4 for at_s in firsts) / len(firsts)
    assert 0.1 < early < 0.4


def test_lengths_are_of_their_period(make_folder: MakeFolder) -> None:
    trace = windows("1,1,Gamma,1,1", "", "1,1,Gamma,1,1", "", "", "", "1,1,Gamma,1,1")
    requests = drawn(make_folder((trace, DATASET)))
    early = [request for request in requests if request.due_s < 5 * WINDOW_S]
    late = [request for request in requests if request.due_s >= 5 * WINDOW_S]
    prompts = [request.num_prompt_tokens for request in early]
    assert set(prompts) == {100, 200}  # before the first period with lengths they are the first's
    assert 0.2 < prompts.count(200) / len(prompts) < 0.3
    assert {request.num_output_tokens for request in early} == {1, 7}
    assert {(request.num_prompt_tokens, request.num_output_tokens) for request in late} == {(4000, 9)}
    assert len({request.runs[0].label for request in requests}) == len(requests)


def test_clients_are_mixed_and_equal_seeds_draw_equal_requests(make_folder: MakeFolder) -> None:
    quiet = DATASET.replace("100: 0.75, 200: 0.25", "33: 1.0")
    folder = make_folder((windows("1,1,Gamma,1,1"), DATASET), (windows("0.5,1,Weibull,1,1"), quiet))
    requests = drawn(folder, seed=3)
    assert len(requests) == 900
    assert sum(request.num_prompt_tokens == 33 for request in requests) == 300
    assert requests == drawn(folder, seed=3)
    assert requests != drawn(folder, seed=4)


def test_rates_and_lengths_are_scaled_and_it_begins_again(make_folder: MakeFolder) -> None:
    folder = make_folder((windows("0.01,1,Gamma,1,1"), DATASET))  # six in a window
    requests = drawn(folder, num_requests=14, rate_scale=2.0, length_scale=0.1)
    assert [request.number for request in requests] == list(range(14))
    assert all(request.due_s <= WINDOW_S / 2 for request in requests[:6])
    assert {request.num_prompt_tokens for request in requests} <= {10, 20}
    times = [request.due_s for request in requests]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("trace", "dataset", "message"),
    [
        ("0,1,1,Gamma,1\n", DATASET, r"chunk-1-trace.csv, line 1: 5 fields; a window has 6"),
        ("0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", DATASET, r"line 2: its window at 0 s does not follow that at 0 s"),
        ("0,much,1,Gamma,1,1\n", DATASET, r"line 1: could not convert"),
        ("0,1,1,Normal,1,1\n", DATASET, r"gaps Normal of shape 1: a rate of 0 or more and Gamma or Weibull of a shape"),
        ("0,1,1,Gamma,0,1\n", DATASET, r"gaps Gamma of shape 0"),
        ("0,-1,1,Gamma,1,1\n", DATASET, r"-1 requests/s"),
        ("0,nan,1,Gamma,1,1\n", DATASET, r"nan requests/s"),
        ("0,1,1,Gamma,1,1\n", "{", r"chunk-1-dataset.json cannot be read"),
        ("0,1,1,Gamma,1,1\n", '{"0": {"input_tokens": "{}", "output_tokens": "{}"}}', r"dataset.json has no lengths"),
        ("0,1,1,Gamma,1,1\n", '{"0": {"text_tokens": "{}"}}', r"'0': no input_tokens and output_tokens, there is text"),
        ("0,1,1,Gamma,1,1\n", '{"x": {"input_tokens": "", "output_tokens": ""}}', r"'x': it is no number of seconds"),
        ("0,1,1,Gamma,1,1\n", DATASET.replace("100: 0.75", "many"), r"1200: no histogram: '\{many"),
        ("0,1,1,Gamma,1,1\n", DATASET.replace("100: 0.75", "100: -0.75"), r"1200: lengths from 100, shares from -0.75"),
        ("0,0,0,,0,0\n", DATASET, r"has no request"),
    ],
)  # fmt: skip
def test_faults_are_named_by_file_and_place(make_folder: MakeFolder, trace: str, dataset: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        drawn(make_folder((trace, dataset)))


def test_clients_have_the_same_windows(make_folder: MakeFolder) -> None:
    one = (windows("1,1,Gamma,1,1"), DATASET)
    with pytest.raises(ConfigurationError, match=r"chunk-1-trace\.csv has 1 windows, all clients together 2"):
        drawn(make_folder(one, (windows("1,1,Gamma,1,1", ""), DATASET)))


def test_a_client_has_two_files(make_folder: MakeFolder) -> None:
    folder = make_folder((windows("1,1,Gamma,1,1"), DATASET))
    (folder / "chunk-1-dataset.json").rename(folder / "chunk-12-dataset.json")
    with pytest.raises(ConfigurationError, match="2 clients have one file of two: chunk-1, chunk-12"):
        drawn(folder)
    for path in list(folder.iterdir()):
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"has no chunk-\*-trace.csv"):
        drawn(folder)
    with pytest.raises(ConfigurationError, match="no folder"):
        drawn(folder / "gone")


TRACES = Path(os.environ.get("DISAGG_SHARED", Path(__file__).parents[3].parent / "shared")) / "traces"


def test_public_clients_are_read(tmp_path: Path) -> None:
    archive = TRACES / "servegen" / "servegen-deepseek-r1.tar.gz"
    if not archive.exists():
        pytest.skip(f"no {archive}: the public traces are not on this machine")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "data" / "reason" / "deepseek-r1"
    clients = read_clients(folder)
    for client in clients:
        client.check_invariants()
    assert len(clients) == 73
    requests = drawn(folder, num_requests=20_000)
    rates = [sum(c.windows[WINDOW_S * place].rate_per_s for c in clients) for place in range(2)]
    first = sum(request.due_s < WINDOW_S for request in requests)
    assert first == pytest.approx(WINDOW_S * rates[0], abs=len(clients))
