"""Engines as processes, each pinned to its cores, spoken to in JSON lines with a deadline for every answer."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.catalog import Command
from peers.environments import Unavailable
from peers.line_loop import Hello

START_TIMEOUT_S = 240.0
CELL_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 10.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class CellFailed(Exception):
    """An engine gave no figure for a cell; the text says why."""


class RunningEngine:
    """One started engine. Close it, whatever happened."""

    def __init__(self, command: Command, num_threads: int) -> None:
        self.command = command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        answers, runner_end = os.pipe()
        arguments = [*command.arguments, "--threads", str(num_threads), "--answers-fd", str(runner_end)]
        variables = {name: str(num_threads) for name in THREAD_VARIABLES}
        variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with _pinned(num_threads):
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(runner_end,),
                env={**os.environ, **variables},
            )
        os.close(runner_end)
        self._answers = answers
        self._rest = b""
        try:
            self.hello = Hello(**self._line(START_TIMEOUT_S))
        except CellFailed as error:
            self.close()
            raise Unavailable(str(error)) from error

    @property
    def name(self) -> str:
        return self.command.entry.name

    def ask(self, request: Mapping[str, object], timeout_s: float = CELL_TIMEOUT_S) -> float:
        """Seconds that the cell took. Raises CellFailed; after a timeout or a death the engine answers nothing more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise CellFailed(self._last_words("it ended")) from error
        answer = self._line(timeout_s)
        if "seconds" not in answer:
            raise CellFailed(str(answer.get("error", answer)))
        return float(answer["seconds"])

    def _line(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                self._process.kill()
                raise CellFailed(f"no answer within {timeout_s:g} s; it was killed")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise CellFailed(self._last_words("it ended"))
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self, what: str) -> str:
        """Why it ended, as far as it shows."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(STOP_TIMEOUT_S)
            what += f" by signal {-code}" if code < 0 else f" with exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{what}: {' | '.join(lines[-3:])}"[-400:]

    def stop(self) -> None:
        """Let the process end after the cell it is at."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process and wait for it. Idempotent."""
        self.stop()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        self._log.close()


@contextlib.contextmanager
def running(commands: Sequence[Command], num_threads: int) -> Iterator[list[RunningEngine]]:
    """All that can be started, in order; the others are named with the reason. None is left afterwards."""
    engines: list[RunningEngine] = []
    try:
        for command in commands:
            try:
                engines.append(RunningEngine(command, num_threads))
            except Unavailable as error:
                print(f"  {command.entry.name}: SKIPPED, {error}", flush=True)
        yield engines
    finally:
        for engine in engines:
            engine.stop()  # first all of them, so that they end side by side
        for engine in engines:
            engine.close()


@contextlib.contextmanager
def _pinned(num_threads: int) -> Iterator[None]:
    """A process started meanwhile keeps to the last num_threads cores, from its first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-num_threads:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_pinned(script: Path, arguments: Sequence[str], python: str, num_threads: int, timeout_s: float) -> str:
    """Standard output of a script that runs to its end on num_threads cores. Raises subprocess errors."""
    variables = {name: str(num_threads) for name in THREAD_VARIABLES}
    with _pinned(num_threads):
        process = subprocess.Popen(
            [python, str(script), *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
        )
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
