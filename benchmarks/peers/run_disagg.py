"""Runner: the engine of this repository, driven by step plans. --kind WEIGHTS:KV, as `disagg serve` calls them.

Prompts are read in chunks of CHUNK_TOKENS, as a worker serves them. The KV arena is filled with random numbers instead
of reading 16 prompts before the first decode cell: what it holds changes no time.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import line_loop
import numpy as np
import torch
from torch import Tensor

from disagg import __version__
from disagg.core.formats import KvDtype, Weights
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.engine.runner import TorchEngine
from disagg.scheduler.engine import StepPlan, StepRow

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
MAX_ROWS = 16
ROW_TOKENS = (2048, *(1024,) * (MAX_ROWS - 1))  # the first row reads prompts too
SPARE_TOKENS = 64  # steps behind a context
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Engine:
    def __init__(self, options: line_loop.Options) -> None:
        self._weights, kv_dtype = options.kind.split(":")
        row_blocks = [-(-(num_tokens + SPARE_TOKENS) // BLOCK_SIZE) for num_tokens in ROW_TOKENS]
        self._engine = TorchEngine(
            Path(options.model),
            num_blocks=sum(row_blocks),
            block_size=BLOCK_SIZE,
            num_threads=options.threads,
            weights=Weights(self._weights),
            kv_dtype=KvDtype(kv_dtype),
        )
        self._scores: list[Tensor] = []  # [S, vocab_size] of the last step
        self._forward = self._engine._model.forward
        self._engine._model.forward = self._keep_scores  # type: ignore[method-assign, assignment]
        self._engine.arena.tensor.normal_()
        blocks = map(BlockId, range(sum(row_blocks)))
        self._tables = [tuple(itertools.islice(blocks, number)) for number in row_blocks]
        self._num_steps = 0

    def hello(self) -> line_loop.Hello:
        return line_loop.Hello(
            engine="disagg",
            version=f"{__version__}, torch {torch.__version__}",
            precision=self._weights,
            kv=self._engine.layout.dtype,
            weight_bytes=_weight_bytes(list(vars(self._engine._model).values())),
            note=f"{self._engine.arithmetic} kernels, chunks of {CHUNK_TOKENS}",
        )

    def contexts(self, tokens: line_loop.Tokens) -> float:
        return 0.0

    def prefill(self, tokens: line_loop.Tokens) -> float:
        return line_loop.timed(lambda: self._read(tokens[0]))[0]

    def _read(self, ids: list[int]) -> None:
        for start in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            self._step([(0, chunk, start)], is_sampled=start + CHUNK_TOKENS >= len(ids))

    def decode(self, batch: int, context: int, steps: int) -> float:
        last = self._step([(row, [100 + row], context) for row in range(batch)])

        def go_on() -> None:
            tokens = last
            for number in range(1, steps + 1):
                tokens = self._step([(row, [tokens[row]], context + number) for row in range(batch)])

        return line_loop.timed(go_on)[0]

    def quality(self, tokens: line_loop.Tokens, path: str) -> float:
        """Token by token, all texts side by side: what a decode worker computes."""
        scores = np.empty((len(tokens), len(tokens[0]), self._engine.config.vocab_size), np.float32)

        def read() -> None:
            for place in range(len(tokens[0])):
                self._step([(row, [ids[place]], place) for row, ids in enumerate(tokens)])
                scores[:, place] = self._scores.pop().float().numpy()  # rows of one position keep their order

        seconds = line_loop.timed(read)[0]
        np.save(path, scores)
        return seconds

    def _keep_scores(self, *step: Any) -> Tensor:
        self._scores = [self._forward(*step)]
        return self._scores[0]

    def _step(self, rows: Sequence[tuple[int, list[int], int]], is_sampled: bool = True) -> list[int]:
        """Run (row, ids, position) as one step; the sampled tokens in order of rows."""
        self._num_steps += 1
        planned = tuple(
            StepRow(
                sequence_id=SequenceId(RequestId(Incarnation(1), 1), row),
                token_ids=tuple(ids),
                position=position,
                block_table=self._tables[row],
                sampling=GREEDY if is_sampled else None,
            )
            for row, ids, position in rows
        )
        result = self._engine.run_step(StepPlan(StepId(self._num_steps), planned), lambda num_layers: None)
        return [token.token_id for token in result.tokens]


def _weight_bytes(part: Any) -> int:
    """Bytes of weights that one decode step reads: those of every linear layer found in this part of the model."""
    if hasattr(part, "num_bytes") and callable(part) and not isinstance(part, type):
        return int(part.num_bytes)
    return sum(_weight_bytes(each) for each in part) if isinstance(part, list | tuple) else 0


if __name__ == "__main__":
    line_loop.run(__doc__, Engine)
