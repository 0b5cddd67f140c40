"""Traces of real traffic as workloads: Mooncake (JSON lines), Azure and BurstGPT (CSV).

Files are read row by row while the workload runs, so that memory does not grow with them. What is wrong with a row is
said with the file's name and the line's number. Rates are scaled by stretching the clock, lengths by a factor; a
Mooncake row keeps its chain of hash ids, so that equal chains still give equal prompts.
"""

import csv
import datetime
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from disagg.bench.workload import FIRST_LABEL, OpenStream, Run, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace, unscaled. hash_ids: one per started block of block_tokens prompt tokens, or none."""

    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(lines: TextIO) -> Iterator[tuple[int, TraceRow]]:
    """(line number, row); times in ms from the start."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, ValueError) as error:
            raise _BadLine(number, str(error)) from None
        num_blocks = -(-row.input_length // MOONCAKE_BLOCK)
        if len(row.hash_ids) != num_blocks or min(row.hash_ids, default=0) < 0:
            text = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens; {num_blocks} of 0 or more are needed"
            raise _BadLine(number, text)
        yield number, TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def read_azure(lines: TextIO) -> Iterator[tuple[int, TraceRow]]:
    """(line number, row) of TIMESTAMP,ContextTokens,GeneratedTokens; wall-clock times, counted from the first."""
    first: datetime.datetime | None = None
    for number, (stamp, prompt, output) in _csv_rows(lines, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        seconds, _, fraction = stamp.partition(".")
        try:
            moment = datetime.datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00")
        except ValueError:
            raise _BadLine(number, f"{stamp!r} is no time such as 2023-11-16 18:17:03.9799600") from None
        first = first or moment
        due_s = (moment - first).total_seconds()
        yield number, TraceRow(due_s, _count(number, prompt), _count(number, output))


def read_burstgpt(lines: TextIO) -> Iterator[tuple[int, TraceRow]]:
    """(line number, row) of Timestamp, Request tokens, Response tokens; seconds. Rows without a response had failed."""
    for number, (stamp, prompt, output) in _csv_rows(lines, ("Timestamp", "Request tokens", "Response tokens")):
        try:
            due_s = float(stamp)
        except ValueError:
            raise _BadLine(number, f"{stamp!r} is no number of seconds") from None
        if _count(number, output):
            yield number, TraceRow(due_s, _count(number, prompt), _count(number, output))


READERS: dict[str, Callable[[TextIO], Iterator[tuple[int, TraceRow]]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}


class TraceWork(msgspec.Struct, frozen=True, kw_only=True):
    """A trace file as a workload, on its own clock.

    Raises ConfigurationError at the start for a file or format that is not there, while it runs for a bad row.
    """

    path: Path
    format: str  # a key of READERS
    rate_scale: float = 1.0  # 2: twice as many requests per second
    length_scale: float = 1.0  # 0.5: prompts and answers half as long
    max_prompt_tokens: int = 1 << 20  # longer prompts are cut
    max_output_tokens: int = 1 << 20
    num_requests: int = 1 << 62  # at most; the trace begins again, its labels changed, where it has fewer
    model: str = ""

    def start(self, rng: random.Random) -> WorkStream:
        if self.format not in READERS:
            raise ConfigurationError(f"trace format {self.format!r} is not one of {', '.join(READERS)}")
        if not self.path.is_file():
            raise ConfigurationError(f"no trace file {self.path}")
        if not self.rate_scale > 0 or not self.length_scale > 0:
            text = f"rate scale {self.rate_scale:g} and length scale {self.length_scale:g}"
            raise ConfigurationError(f"{text}: both must be above 0")
        return OpenStream(self._requests())

    def _requests(self) -> Iterator[WorkRequest]:
        number, begin_s, last_s, is_endless = 0, 0.0, 0.0, self.num_requests < 1 << 62
        label = FIRST_LABEL
        while True:
            next_label = label
            for row in self._rows():
                if number >= self.num_requests:
                    return
                last_s = begin_s + row.due_s / self.rate_scale
                runs, top = self._runs(row, label, next_label)
                next_label = max(next_label, top)
                num_output = min(self.max_output_tokens, max(1, round(row.num_output_tokens * self.length_scale)))
                yield WorkRequest(number, last_s, runs, num_output, self.model)
                number += 1
            if number == 0:
                raise ConfigurationError(f"{self.path} has no request")
            if not is_endless:
                return
            begin_s, label = last_s, next_label

    def _runs(self, row: TraceRow, label: int, next_label: int) -> tuple[tuple[Run, ...], int]:
        """The row's prompt, and a label that no row so far has used. Labels of this pass over the file start at one."""
        num_left = min(self.max_prompt_tokens, max(1, round(row.num_prompt_tokens * self.length_scale)))
        if not row.hash_ids:
            return (Run(next_label, num_left),), next_label + 1
        each = max(1, round(MOONCAKE_BLOCK * self.length_scale))
        runs: list[Run] = []
        for hash_id in row.hash_ids:
            num_tokens = min(each, num_left)
            if num_tokens <= 0:
                break
            runs.append(Run(label + hash_id, num_tokens))
            num_left -= num_tokens
        return tuple(runs), label + max(row.hash_ids) + 1

    def _rows(self) -> Iterator[TraceRow]:
        """In order of time, with every error under the file's name."""
        last_s = 0.0
        with self.path.open(encoding="utf-8", newline="") as lines:
            try:
                for number, row in READERS[self.format](lines):
                    if row.due_s < last_s:
                        raise _BadLine(number, f"its time {row.due_s:g} s is before the {last_s:g} s of the one above")
                    if row.num_prompt_tokens < 1 or row.num_output_tokens < 1:
                        text = f"{row.num_prompt_tokens} prompt and {row.num_output_tokens} answer tokens"
                        raise _BadLine(number, f"{text}: both must be 1 or more")
                    last_s = row.due_s
                    yield row
            except _BadLine as bad:
                raise ConfigurationError(f"{self.path}, line {bad.number}: {bad.what}") from None
            except UnicodeDecodeError as error:
                raise ConfigurationError(f"{self.path} is not text: {error}") from None


class _BadLine(Exception):
    """A row that cannot be read; lines count from 1."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, what)
        self.number = number
        self.what = what


def _csv_rows(lines: TextIO, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """The wanted columns of each row, found by their names in the first line."""
    reader = csv.reader(lines)
    names = [name.strip().lstrip("\N{BYTE ORDER MARK}") for name in next(reader, [])]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise _BadLine(1, f"no column {', '.join(missing)}; there is {', '.join(names) or 'nothing'}")
    places = [names.index(name) for name in wanted]
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            raise _BadLine(reader.line_num, f"{len(row)} fields, the first line names {len(names)}")
        yield reader.line_num, [row[place].strip() for place in places]


def _count(number: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _BadLine(number, f"{text!r} is no number of tokens") from None
