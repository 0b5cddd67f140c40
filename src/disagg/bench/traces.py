"""Traces of real traffic as workloads: Mooncake, Azure and BurstGPT files, and folders of ServeGen's clients.

Files are read row by row while the workload runs, so that memory does not grow with them. Rates are scaled by
stretching the clock, lengths by a factor; a Mooncake row keeps its chain of hash ids, so that equal chains still give
equal prompts.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from disagg.bench.servegen import draw_requests
from disagg.bench.trace_files import MOONCAKE_BLOCK, READERS, BadLine, TraceRow
from disagg.bench.workload import FIRST_LABEL, OpenStream, Run, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

SERVEGEN: Final = "servegen"
TRACE_FORMATS: Final = (*READERS, SERVEGEN)


class TraceWork(msgspec.Struct, frozen=True, kw_only=True):
    """A trace as a workload, on its own clock: a file, of ServeGen a folder of clients, whose requests are drawn.

    Raises ConfigurationError at the start for a path or format that is not there, while it runs for a bad row.
    """

    path: Path
    format: str  # one of TRACE_FORMATS
    rate_scale: float = 1.0  # 2: twice as many requests per second
    length_scale: float = 1.0  # 0.5: prompts and answers half as long
    max_prompt_tokens: int = 1 << 20  # longer prompts are cut
    max_output_tokens: int = 1 << 20
    num_requests: int = 1 << 62  # at most; the trace begins again, its labels changed, where it has fewer
    model: str = ""

    def start(self, rng: random.Random) -> WorkStream:
        if self.format not in TRACE_FORMATS:
            raise ConfigurationError(f"trace format {self.format!r} is not one of {', '.join(TRACE_FORMATS)}")
        if self.format == SERVEGEN and not self.path.is_dir():
            raise ConfigurationError(f"no folder {self.path} of ServeGen's chunk-*-trace.csv and chunk-*-dataset.json")
        if self.format != SERVEGEN and not self.path.is_file():
            raise ConfigurationError(f"no trace file {self.path}")
        if not self.rate_scale > 0 or not self.length_scale > 0:
            text = f"rate scale {self.rate_scale:g} and length scale {self.length_scale:g}"
            raise ConfigurationError(f"{text}: both must be above 0")
        return OpenStream(self._requests(rng))

    def _requests(self, rng: random.Random) -> Iterator[WorkRequest]:
        number, begin_s, last_s, is_endless = 0, 0.0, 0.0, self.num_requests < 1 << 62
        label = FIRST_LABEL
        while True:
            next_label = label
            for row in draw_requests(self.path, rng) if self.format == SERVEGEN else self._rows():
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
        num_tokens = min(self.max_prompt_tokens, max(1, round(row.num_prompt_tokens * self.length_scale)))
        if not row.hash_ids:
            return (Run(next_label, num_tokens),), next_label + 1
        runs: list[Run] = []
        begin = 0
        for place, hash_id in enumerate(row.hash_ids, 1):
            # Edges are rounded, not blocks: nothing adds up, and equal chains have equal edges.
            end = min(num_tokens, round(place * MOONCAKE_BLOCK * self.length_scale))
            if end > begin:
                runs.append(Run(label + hash_id, end - begin))
                begin = end
        # Of a block that became nothing one token is left.
        return tuple(runs) or (Run(label + row.hash_ids[0], num_tokens),), label + max(row.hash_ids) + 1

    def _rows(self) -> Iterator[TraceRow]:
        """Of a file, in order of time, with every error under its name."""
        last_s = 0.0
        with self.path.open(encoding="utf-8", newline="") as lines:
            try:
                for number, row in READERS[self.format](lines):
                    if row.due_s < last_s:
                        raise BadLine(number, f"its time {row.due_s:g} s is before the {last_s:g} s of the one above")
                    if not row.due_s < math.inf:
                        raise BadLine(number, f"its time is {row.due_s:g} s")
                    if row.num_prompt_tokens < 1 or row.num_output_tokens < 1:
                        text = f"{row.num_prompt_tokens} prompt and {row.num_output_tokens} answer tokens"
                        raise BadLine(number, f"{text}: both must be 1 or more")
                    last_s = row.due_s
                    yield row
            except BadLine as bad:
                raise ConfigurationError(f"{self.path}, line {bad.number}: {bad.what}") from None
            except UnicodeDecodeError as error:
                raise ConfigurationError(f"{self.path} is not text: {error}") from None
