"""The loop of `disagg top`: look, draw, wait. Rates are over the last WINDOW_S seconds, so that figures hold still."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from disagg.cli.top_view import SHOWN, Line, Look, absent, fitted, picture
from disagg.cluster.view import RouterWatch
from disagg.core.errors import ConfigurationError
from disagg.telemetry.reading import read

WINDOW_S = 10.0


def run_top(url: str, interval_s: float, *, once: bool) -> int:
    """Blocking; the exit code. Raises ConfigurationError when nobody answers and it is for once."""
    is_live = sys.stdout.isatty() and not once
    work = _watch(url, interval_s) if is_live else _print_once(url, interval_s, sys.stdout)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):  # how one ends it
        asyncio.run(work)
    return 0


async def _look(watch: RouterWatch) -> Look | None:
    """None when the router does not answer, or is none."""
    cluster, text = await asyncio.gather(watch.cluster(), watch.metrics())
    if cluster is None or text is None:
        return None
    return Look(time.monotonic(), cluster, read(text, SHOWN))


async def _print_once(url: str, interval_s: float, out: TextIO) -> None:
    watch = RouterWatch(url)
    try:
        before = await _look(watch)
        if before is not None:
            await asyncio.sleep(interval_s)
        now = await _look(watch)
    finally:
        await watch.close()
    if now is None:
        raise ConfigurationError(f"no router answers at {url}: start one (disagg serve) or name it with --url")
    for line in picture(before, now, url):
        print(line.text, file=out)


async def _watch(url: str, interval_s: float) -> None:
    """Until cancelled."""
    watch, console = RouterWatch(url), Console()
    looks: deque[Look] = deque()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # the screen is given back; a shell may have had Ctrl-C ignored
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        with live:
            while True:
                now = await _look(watch)
                if now is not None:
                    looks.append(now)
                    while len(looks) > 2 and looks[1].at_s <= now.at_s - WINDOW_S:
                        looks.popleft()
                lines = _lines(looks, url, is_away=now is None)
                live.update(_text(fitted(lines, console.height)), refresh=True)
                await asyncio.sleep(interval_s)
    finally:
        await watch.close()


def _lines(looks: deque[Look], url: str, *, is_away: bool) -> list[Line]:
    """The picture of the last look, under a word that it is old when the router is away."""
    if not looks:
        return absent(url, None)
    before = looks[0] if len(looks) > 1 else None
    shown = picture(before, looks[-1], url)
    return [*absent(url, time.monotonic() - looks[-1].at_s), *shown] if is_away else shown


def _text(lines: list[Line]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(lines):
        text.append(("\n" if number else "") + line.text, style="bold" if line.is_title else None)
    return text
