"""`disagg top`: what it makes of two looks, and what it does where nobody answers."""

import http.server
import io
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from disagg.cli.main import main
from disagg.cli.top_screen import Screen, drawn
from disagg.cli.top_view import SHOWN, Away, Line, Look, absent, duration, fitted, picture
from disagg.cluster.view import ClusterView, ModelView, RouterView, WorkerStateView, WorkerView
from disagg.telemetry import metrics as table
from disagg.telemetry.exposition import Family, Sample, exposition, histogram_samples, labels_text
from disagg.telemetry.reading import read

STATE = WorkerStateView(
    num_free_blocks=60,
    num_cached_blocks=10,
    num_held_blocks=25,
    num_reserved_blocks=4,
    num_quarantined_blocks=1,
    num_waiting=3,
    num_running=8,
    num_decoding=5,
    num_handoffs=2,
    num_waiting_tokens=4096,
)
CLUSTER = ClusterView(
    RouterView("abc", num_open_requests=12, uptime_s=3725.0),
    (ModelView("tiny", is_ready=True), ModelView("big", is_ready=False, missing="no worker has registered")),
    (
        WorkerView("d0", "decode", "tiny", STATE, draining=True),
        WorkerView("p1", "prefill", "tiny", WorkerStateView(num_free_blocks=100)),
        WorkerView("p0", "prefill", "tiny", STATE),
    ),
)
URL = "http://h:1"


def scrape(number: int, seconds: float = 0.0) -> bytes:
    """What the router has counted when `number` requests have ended."""
    path, worker = labels_text(("path", "remote")), labels_text(("worker", "d0"))
    counts = [0] * (len(table.TTFT_SECONDS.buckets) + 1)
    counts[3] = number
    families: list[Family] = [
        (table.REQUESTS, [Sample(labels_text(("outcome", "finished")), number)]),
        (table.CHOICES_WAITING, [Sample("", 4)]),
        (table.GENERATED_TOKENS, [Sample("", 100 * number)]),
        (table.TTFT_SECONDS, histogram_samples(path, table.TTFT_SECONDS.buckets, counts, 1.0)),
        (table.HANDOFFS, [Sample(f'{worker},outcome="sent"', number)]),
        (table.HANDOFF_BYTES, [Sample(f'{worker},visibility="hidden"', 3e6 * number)]),
        (table.HANDOFF_BYTES, [Sample(f'{worker},visibility="visible"', 1e6 * number)]),
        (table.STEP_SECONDS, [Sample(f'{worker},kind="decode"', seconds)]),
        (table.OUTPUT_TOKENS, [Sample(f'{worker},task="decode"', 90 * number)]),
        (table.LINK_BANDWIDTH, [Sample('worker="p0",peer="d0"', 2.5e9)]),
    ]
    return exposition(families)


def look(at_s: float, number: int, seconds: float = 0.0) -> Look:
    return Look(at_s, CLUSTER, read(scrape(number, seconds).decode(), SHOWN))


def test_totals_become_rates_between_two_looks() -> None:
    lines = [line.text for line in picture(look(10.0, 20, 1.0), look(20.0, 40, 4.0), URL)]
    assert lines[0] == "disagg at http://h:1   up 1 h 2 min   tiny ready   big: no worker has registered"
    assert lines[1].startswith("requests   open 12   queued at the router 4   ended 2.0/s   turned away 0/s")
    assert lines[2] == "tokens     prompt 0/s   generated 200/s"
    assert "TTFT p50 75 ms  p95 97.5 ms   ITL -" in lines[3]
    assert lines[5] == "hand-offs  open 4 ends   sent 2.0/s   8 MB/s   hidden 75 %"
    header, *rows = lines[7:]
    assert [row.split()[0] for row in rows] == ["p0", "p1", "d0"]
    assert rows[2].split() == [
        *("d0", "decode", "draining", "3", "8", "5", "4096", "[###.......]", "30/100", "30", "%", "0", "180"),
        *("2", "10", "1"),
    ]
    assert rows[0].endswith("1 at up to 2.5 GB/s")
    assert rows[2].index("draining") == header.index("state")
    assert len({len(row) for row in rows[1:]}) == 1


def test_before_a_second_look_rates_are_unknown_and_percentiles_are_of_everything() -> None:
    lines = [line.text for line in picture(None, look(10.0, 20), URL)]
    assert "ended -/s" in lines[1]
    assert "TTFT p50 75 ms" in lines[3]
    assert " -  " in lines[8]


def test_a_router_that_began_anew_gives_no_negative_rates() -> None:
    lines = [line.text for line in picture(look(10.0, 500), look(20.0, 10), URL)]
    assert "ended 1.0/s" in lines[1]
    assert not [line for line in lines if "-1" in line]


def test_an_empty_cluster_says_so() -> None:
    empty = Look(1.0, ClusterView(), read("", SHOWN))
    lines = picture(None, empty, URL)
    assert lines[-1].text == "no worker is connected"
    assert "no model" in lines[0].text


def test_a_router_that_is_away_is_said_with_why_and_with_the_age_of_what_is_shown() -> None:
    title, line = absent(URL, Away("nobody listens there"), None)
    assert title == Line("no router answers at http://h:1", is_title=True)
    assert line.text.strip() == "nobody listens there   still asking, Ctrl-C ends this"
    assert "the last answer is 1 min 12 s old" in absent(URL, Away(""), 72.3)[1].text


def test_what_does_not_fit_is_counted() -> None:
    lines = [Line(str(number)) for number in range(10)]
    assert fitted(lines, 10) == lines
    short = fitted(lines, 4)
    assert [line.text for line in short[:3]] == ["0", "1", "2"]
    assert short[3].text.startswith("... 7 more lines")


def test_a_narrow_terminal_loses_whole_columns_and_is_told_which() -> None:
    wide, narrow = (picture(look(10.0, 20, 1.0), look(20.0, 40, 4.0), URL, width) for width in (200, 80))
    header, hint = narrow[-4].text, " ".join(line.text for line in narrow[:-4]).partition("a wider terminal shows ")[2]
    assert max(len(line.text) for line in narrow) <= 80 < max(len(line.text) for line in wide)
    seen = [name for name in ("worker", "state", "waiting", "KV blocks in use", "busy", "written/s") if name in header]
    assert len(seen) == 6
    for name in ("running", "cached", "sends to"):
        assert name in hint
        assert name not in header
    assert narrow[-1].text.split()[-2:] == ["0", "180"]
    assert {word for line in wide[:-5] for word in line.text.split()} < {
        word for line in narrow[:-4] for word in line.text.split()
    }


def test_a_line_is_no_wider_than_the_terminal_and_steers_nothing() -> None:
    assert drawn(Line("abc"), 3) == "abc"
    assert drawn(Line("abc"), 4) == "abc\x1b[K"
    assert drawn(Line("abcd", is_title=True), 3) == "\x1b[1mab\N{HORIZONTAL ELLIPSIS}\x1b[0m"
    assert drawn(Line("\u6f22\u5b57"), 4) == "\u6f22\u5b57"
    assert drawn(Line("\u6f22\u5b57"), 3) == "\u6f22\N{HORIZONTAL ELLIPSIS}"
    assert "\x1b" not in drawn(Line("a\x1b[2Jb\rc\nd"), 10)


def test_the_screen_is_drawn_whole_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "3")
    raw = io.BytesIO()
    with Screen(io.TextIOWrapper(raw, encoding="latin-1")) as screen:
        before = raw.tell()
        screen.show([Line("one"), Line("two")])
        assert raw.getvalue()[before:] == b"\x1b[Hone\x1b[K\r\ntwo\x1b[K\r\n\x1b[J"
        before = raw.tell()
        screen.show([Line(str(number)) for number in range(4)])
        assert raw.getvalue()[before:] == b"\x1b[H0\x1b[K\r\n1\x1b[K\r\n... 2 mor?"
        before = raw.tell()
    assert raw.getvalue()[before:] == b"\x1b[?25h\x1b[?1049l"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90000, "1 d 1 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- the command ------------------------------------------------------------------------------------------------


class _Router(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += self.path == "/metrics"
        body = msgspec.json.encode(CLUSTER) if self.path == "/cluster" else scrape(10 * type(self).asked)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


class _Other(_Router):
    """No router."""

    def do_GET(self) -> None:
        self.send_error(404)


@pytest.fixture(params=[_Router])
def router(request: pytest.FixtureRequest) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(30.0)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", "top", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_once_prints_plain_lines_with_rates(
    router: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--url", router + "/", "--once", "--interval-s", "0.2") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert f"disagg at {router}   up 1 h 2 min" in captured.out
    assert "-/s" not in captured.out
    assert "p1      prefill" in captured.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--url", "127.0.0.1:8000"), "is no address of a router: write --url http://host:port"),
        (("--interval-s", "0"), "--interval-s is 0: it must be at least 0.2"),
    ],
)
def test_what_cannot_work_is_one_plain_line(
    arguments: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert line in capsys.readouterr().err


def test_nobody_there_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert run(monkeypatch, "--url", url, "--once") == 2
    error = capsys.readouterr().err
    assert error == (
        f"disagg: no router answers at {url} (nobody listens there): start one (disagg serve) or name it with --url\n"
    )


@pytest.mark.parametrize("router", [_Other], indirect=True)
def test_another_server_is_said_to_be_one(
    router: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--url", router, "--once") == 2
    assert f"no router answers at {router} (HTTP 404 for /cluster)" in capsys.readouterr().err


def test_the_wrong_scheme_is_asked_about(
    router: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--url", router.replace("http:", "https:"), "--once") == 2
    assert "is it http, or https?" in capsys.readouterr().err
