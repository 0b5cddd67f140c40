"""What int8 weights cost on the real model: less than a hundredth of perplexity, and the same likeliest tokens."""

import difflib
import heapq
import inspect
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.unit.engine.steps import make_engine, make_row

from disagg.core.formats import KvDtype, Weights
from disagg.core.ids import StepId
from disagg.engine.native.library import load_library
from disagg.engine.runner import TorchEngine
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.scheduler.engine import Scoring, StepPlan

NUM_PIECES, PIECE_TOKENS = 4, 320
MAX_LOSS, MIN_AGREEMENT = 0.01, 0.97


class Read(NamedTuple):
    """Of a text: what was thought likeliest at each place, and how surprising it was."""

    likeliest: list[int]
    perplexity: float


def read(engine: TorchEngine, pieces: list[list[int]]) -> Read:
    likeliest: list[int] = []
    loss = 0.0
    for ids in pieces:
        row = make_row(0, ids, 0, list(range(PIECE_TOKENS // 16)), None)
        row = msgspec.structs.replace(row, scoring=Scoring(tuple(ids[1:]), 1))
        (scores,) = engine.run_step(StepPlan(StepId(0), (row,)), lambda num_layers: None).scores
        likeliest += [each.top[0][0] for each in scores.logprobs]
        loss -= sum(each.chosen for each in scores.logprobs)
    return Read(likeliest, math.exp(loss / len(likeliest)))


@pytest.mark.real_model
def test_int8_keeps_its_bar(smollm2_path: Path) -> None:
    """Prose that every Python brings along; KV in float16 as it is served."""
    if load_library() is None:
        pytest.skip("int8 needs the native kernels")
    sources = (difflib.SequenceMatcher, difflib.Differ, statistics, difflib.HtmlDiff)
    text = "\n\n".join([heapq.__about__, *(inspect.getdoc(each) or "" for each in sources)])
    ids = load_tokenizer(smollm2_path).encode(text)
    assert len(ids) >= NUM_PIECES * PIECE_TOKENS, len(ids)
    pieces = [ids[start : start + PIECE_TOKENS] for start in range(0, NUM_PIECES * PIECE_TOKENS, PIECE_TOKENS)]
    exact = read(make_engine(smollm2_path, num_blocks=40), pieces)
    int8 = read(
        make_engine(smollm2_path, num_blocks=40, weights=Weights.INT8, kv_dtype=KvDtype.FLOAT16),
        pieces,
    )
    same = sum(one == other for one, other in zip(exact.likeliest, int8.likeliest, strict=True))
    loss, agreement = int8.perplexity / exact.perplexity - 1, same / len(exact.likeliest)
    print(f"perplexity {exact.perplexity:.3f}, {100 * loss:+.2f} %; {100 * agreement:.1f} % the same likeliest token")
    assert loss <= MAX_LOSS
    assert agreement >= MIN_AGREEMENT
