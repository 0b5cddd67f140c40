"""The loop of `disagg top`: look, draw, wait. Rates are over the last WINDOW_S seconds, so that figures hold still."""

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import time
from collections import deque
from typing import TextIO

import msgspec

from disagg.bench.http_client import HttpClient, why_silent
from disagg.channel.garbage import collect_rarely
from disagg.cli.top_screen import Screen
from disagg.cli.top_view import SHOWN, Away, Line, Look, absent, picture
from disagg.cluster.view import ANSWER_TIMEOUT_S, ClusterView
from disagg.core.errors import ConfigurationError
from disagg.telemetry.reading import read

WINDOW_S = 10.0
_OK = 200


def run_top(url: str, interval_s: float, *, once: bool) -> int:
    """Blocking; the exit code. Raises ConfigurationError when nobody answers and it is for once."""
    is_live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not once
    work = _watch(url, interval_s, Screen(sys.stdout)) if is_live else _print_once(url, interval_s, sys.stdout)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):  # how one ends it
        asyncio.run(work)
    return 0


def _client(url: str) -> HttpClient:
    """A router's certificate need not be made for the name that it is reached by: nothing secret is said."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return HttpClient(url, tls=tls)


async def _look(client: HttpClient) -> Look | Away:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answers = {path: await client.get(path) for path in ("/cluster", "/metrics")}
    except TimeoutError:
        return Away(f"no answer within {ANSWER_TIMEOUT_S:g} s")
    except OSError as error:
        return Away(why_silent(error))
    for path, (status, _) in answers.items():
        if status != _OK:
            return Away(f"HTTP {status} for {path}")
    try:
        cluster = msgspec.json.decode(answers["/cluster"][1], type=ClusterView)
    except msgspec.DecodeError as error:
        return Away(f"/cluster is none of a router: {error}")
    return Look(time.monotonic(), cluster, read(answers["/metrics"][1].decode(errors="replace"), SHOWN))


async def _print_once(url: str, interval_s: float, out: TextIO) -> None:
    async with _client(url) as client:
        before = await _expected(client, url)
        await asyncio.sleep(interval_s)
        now = await _expected(client, url)
    for line in picture(before, now, url):
        print(line.text, file=out)


async def _expected(client: HttpClient, url: str) -> Look:
    """Raises ConfigurationError where there is no router."""
    found = await _look(client)
    if isinstance(found, Away):
        why = f"no router answers at {url} ({found.why}): start one (disagg serve) or name it with --url"
        raise ConfigurationError(why)
    return found


async def _watch(url: str, interval_s: float, screen: Screen) -> None:
    """Until cancelled."""
    looks: deque[Look] = deque()
    changed = asyncio.Event()  # the terminal: its size, or that it is ours again
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # the screen is given back; a shell may have had Ctrl-C ignored
        loop.add_signal_handler(number, task.cancel)
    for number in (signal.SIGWINCH, signal.SIGCONT):
        loop.add_signal_handler(number, changed.set)
    collect_rarely()
    async with _client(url) as client:
        with screen:
            while True:
                found = await _look(client)
                if isinstance(found, Look):
                    looks.append(found)
                    while len(looks) > 2 and looks[1].at_s <= found.at_s - WINDOW_S:
                        looks.popleft()
                next_s = time.monotonic() + interval_s
                screen.show(_lines(looks, url, found, screen.width))
                while await _is_changed(changed, next_s):
                    screen.show(_lines(looks, url, found, screen.width))


async def _is_changed(changed: asyncio.Event, until_s: float) -> bool:
    """Wait for it until then."""
    changed.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until_s - time.monotonic()):
            await changed.wait()
    return changed.is_set()


def _lines(looks: deque[Look], url: str, found: Look | Away, width: int) -> list[Line]:
    """The picture of the last look, under a word that it is old when the router is away."""
    shown = picture(looks[0] if len(looks) > 1 else None, looks[-1], url, width) if looks else []
    if isinstance(found, Look):
        return shown
    since_s = time.monotonic() - looks[-1].at_s if looks else None
    return [*absent(url, found, since_s, width), Line(""), *shown]
