"""How `disagg serve` shows the cluster: one live line per worker on a terminal, changed lines otherwise."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from disagg.cluster.supervisor import ProcessPhase, ProcessSnapshot
from disagg.cluster.view import WorkerView


class Display(Protocol):
    """Where serve's words go."""

    def note(self, line: str) -> None:
        """Something a person should read."""

    def child_line(self, name: str, line: str) -> None:
        """A line that a process wrote."""

    def show(self, lines: Mapping[str, str], now_s: float) -> None:
        """The state of each worker, by name; now_s in seconds on any steady clock."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


class PlainDisplay:
    """For logs: a worker's line is printed when it changes, at most once per min_interval_s and worker.

    A full disk or a closed pipe costs lines, never the service.
    """

    def __init__(self, out: TextIO, err: TextIO, *, min_interval_s: float = 5.0) -> None:
        self._out = out
        self._err = err
        self._min_interval_s = min_interval_s
        self._shown: dict[str, tuple[str, float]] = {}

    def note(self, line: str) -> None:
        _print(line, self._out)

    def child_line(self, name: str, line: str) -> None:
        _print(f"[{name}] {line}", self._err)

    def show(self, lines: Mapping[str, str], now_s: float) -> None:
        for name, line in lines.items():
            last = self._shown.get(name)
            if last is None or (line != last[0] and now_s - last[1] >= self._min_interval_s):
                self._shown[name] = (line, now_s)
                _print(line, self._out)

    def close(self) -> None:
        """Throw away what could not be written: the interpreter would fail over it at its end."""
        for stream in (self._out, self._err):
            try:
                stream.flush()
            except OSError:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


def _print(line: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)


class LiveDisplay:
    """For a terminal: notes and child lines scroll by above the workers' lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def note(self, line: str) -> None:
        # Text, not str: square brackets in a process's words are no markup. Not wrapped: commands must paste well.
        self._console.print(Text(line), soft_wrap=True)

    def child_line(self, name: str, line: str) -> None:
        self._console.print(Text.assemble((f"[{name}] ", "dim"), line), soft_wrap=True)

    def show(self, lines: Mapping[str, str], now_s: float) -> None:
        self._live.update(Text("\n".join(lines.values()), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_display() -> Display:
    """Live on a terminal, plain otherwise."""
    console = Console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(sys.stdout, sys.stderr)


def worker_lines(
    names: Sequence[str], views: Sequence[WorkerView], processes: Sequence[ProcessSnapshot]
) -> dict[str, str]:
    """One line per worker of ours, in the given order, then per worker that others started."""
    by_id = {view.worker_id: view for view in views}
    by_name = {process.name: process for process in processes}
    order = [*names, *sorted(by_id.keys() - set(names))]
    width = max((len(name) for name in order), default=0)
    return {name: f"{name:<{width}}  {_describe(by_id.get(name), by_name.get(name))}" for name in order}


def _describe(view: WorkerView | None, process: ProcessSnapshot | None) -> str:
    if process is not None and process.phase is not ProcessPhase.RUNNING:
        why = f": {process.last_exit.decision.reason}" if process.last_exit is not None else ""
        return f"{process.phase.value}{why}"
    restarts = f"  restarts {process.num_starts - 1}" if process is not None and process.num_starts > 1 else ""
    if view is None or not view.connected:
        return f"not connected{restarts}"
    state = view.state
    used = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
    total = used + state.num_free_blocks + state.num_cached_blocks
    return (
        f"{view.role:<7}  running {state.num_running}  waiting {state.num_waiting}  hand-offs {state.num_handoffs}  "
        f"KV {used}/{total} blocks  cached {state.num_cached_blocks}{restarts}"
    )
