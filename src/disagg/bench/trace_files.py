"""Rows of trace files: Mooncake (JSON lines), Azure and BurstGPT (CSV). Faults are said with their lines."""

import csv
import datetime
from collections.abc import Callable, Iterator
from typing import TextIO

import msgspec

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace, unscaled. hash_ids: one per started block of block_tokens prompt tokens, or none."""

    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


class BadLine(Exception):
    """A row that cannot be read; lines count from 1."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, what)
        self.number = number
        self.what = what


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
            raise BadLine(number, str(error)) from None
        num_blocks = -(-row.input_length // MOONCAKE_BLOCK)
        if len(row.hash_ids) != num_blocks or min(row.hash_ids, default=0) < 0:
            text = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens; {num_blocks} of 0 or more are needed"
            raise BadLine(number, text)
        yield number, TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def read_azure(lines: TextIO) -> Iterator[tuple[int, TraceRow]]:
    """(line number, row) of TIMESTAMP,ContextTokens,GeneratedTokens; wall-clock times, counted from the first."""
    first: datetime.datetime | None = None
    for number, (stamp, prompt, output) in _csv_rows(lines, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        seconds, _, fraction = stamp.removesuffix("+00:00").partition(".")
        try:
            moment = datetime.datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00")
        except ValueError:
            raise BadLine(number, f"{stamp!r} is no time such as 2023-11-16 18:17:03.9799600") from None
        first = first or moment
        due_s = (moment - first).total_seconds()
        yield number, TraceRow(due_s, _count(number, prompt), _count(number, output))


def read_burstgpt(lines: TextIO) -> Iterator[tuple[int, TraceRow]]:
    """(line number, row) of Timestamp, Request tokens, Response tokens; seconds. Rows without a response had failed."""
    for number, (stamp, prompt, output) in _csv_rows(lines, ("Timestamp", "Request tokens", "Response tokens")):
        try:
            due_s = float(stamp)
        except ValueError:
            raise BadLine(number, f"{stamp!r} is no number of seconds") from None
        if _count(number, output):
            yield number, TraceRow(due_s, _count(number, prompt), _count(number, output))


READERS: dict[str, Callable[[TextIO], Iterator[tuple[int, TraceRow]]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}


def _csv_rows(lines: TextIO, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """The wanted columns of each row, found by their names in the first line."""
    reader = csv.reader(lines)
    names = [name.strip().lstrip("\N{BYTE ORDER MARK}") for name in next(reader, [])]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise BadLine(1, f"no column {', '.join(missing)}; there is {', '.join(names) or 'nothing'}")
    places = [names.index(name) for name in wanted]
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            raise BadLine(reader.line_num, f"{len(row)} fields, the first line names {len(names)}")
        yield reader.line_num, [row[place].strip() for place in places]


def _count(number: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadLine(number, f"{text!r} is no number of tokens") from None
