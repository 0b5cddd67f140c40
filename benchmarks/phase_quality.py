"""What it costs in quality to store weights otherwise in one phase, or in both.

usage: python benchmarks/phase_quality.py [--quick]

Pieces of prose: the first half is read with the prefill side's weights, its KV cache goes to the decode side, which
reads the second half token after token with its own. Scores of the second half are compared with fp32 on both sides.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from disagg.core.formats import KvDtype, Weights
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.engine.runner import TorchEngine
from disagg.modelfiles.fetch import resolve_model
from disagg.scheduler.engine import StepPlan, StepRow
from peers import quality

NUM_PIECES, PIECE_TOKENS, BLOCK = 8, 160, 16
GREEDY = SamplingParams(max_tokens=PIECE_TOKENS, temperature=0.0)


class Side:
    """One engine whose vocabulary scores can be seen."""

    def __init__(self, model: Path, weights: Weights, kv_dtype: KvDtype) -> None:
        num_blocks = NUM_PIECES * PIECE_TOKENS // BLOCK
        self.engine = TorchEngine(model, num_blocks=num_blocks, block_size=BLOCK, weights=weights, kv_dtype=kv_dtype)
        self._forward = self.engine._model.forward
        self.engine._model.forward = self._keep  # type: ignore[method-assign]
        self.scores = torch.empty(0)
        self._step = 0

    def _keep(self, *step: Any) -> Tensor:
        self.scores = self._forward(*step)
        return self.scores

    def read(self, texts: list[list[int]], position: int) -> None:
        """One step: these tokens of every piece, from one position on."""
        each = PIECE_TOKENS // BLOCK
        rows = tuple(
            StepRow(
                SequenceId(RequestId(Incarnation(1), number), 0),
                tuple(ids),
                position,
                tuple(BlockId(number * each + index) for index in range(each)),
                GREEDY,
            )
            for number, ids in enumerate(texts)
        )
        self._step += 1
        self.engine.run_step(StepPlan(StepId(self._step), rows), lambda layers: None)


def scores_of(prefill: Side, decode: Side, texts: list[list[int]]) -> Tensor:
    """[places, pieces, vocab] of the second half."""
    half = PIECE_TOKENS // 2
    prefill.read([ids[:half] for ids in texts], 0)
    decode.engine.arena.tensor.copy_(prefill.engine.arena.tensor)
    found = []
    for place in range(half, PIECE_TOKENS):
        decode.read([[ids[place]] for ids in texts], place)
        found.append(decode.scores.clone())
    return torch.stack(found)


def compare(scores: Tensor, reference: Tensor, texts: list[list[int]]) -> dict[str, float]:
    """Perplexity, mean KL in nats, share of places with the same likeliest token."""
    logs, wanted = scores.double().log_softmax(-1), reference.double().log_softmax(-1)
    following = torch.tensor(texts)[:, PIECE_TOKENS // 2 + 1 :].T[..., None]
    return {
        "perplexity": math.exp(-float(logs[:-1].gather(2, following).mean())),
        "kl": float((wanted.exp() * (wanted - logs)).sum(-1).mean()),
        "top1": float((scores.argmax(-1) == reference.argmax(-1)).double().mean()),
    }


def main() -> None:
    args = harness.options(__doc__, rounds=1).parse_args()
    print(harness.heading(args))
    model = resolve_model(args.model)
    texts = quality.pieces(model, NUM_PIECES, PIECE_TOKENS)
    print(f"text {quality.digest()}, {NUM_PIECES} pieces of {PIECE_TOKENS} tokens")
    exact = scores_of(*(Side(model, Weights.FP32, KvDtype.FLOAT32) for _ in range(2)), texts)
    sides = {kind: (Side(model, kind, KvDtype.FLOAT16), Side(model, kind, KvDtype.FLOAT16)) for kind in Weights}
    base = compare(exact, exact, texts)
    print(f"{'prefill':8} {'decode':8} {'perplexity':>10} {'change':>8} {'mean KL':>9} {'same top':>8}   (KV float16)")
    result: dict[str, Any] = {"reference_perplexity": round(base["perplexity"], 3)}
    for first, second in product(Weights, Weights):
        found = compare(scores_of(sides[first][0], sides[second][1], texts), exact, texts)
        change = found["perplexity"] / base["perplexity"] - 1
        print(
            f"{first.value:8} {second.value:8} {found['perplexity']:10.3f} {100 * change:+7.2f}% {found['kl']:9.1e}"
            f" {100 * found['top1']:7.2f}%"
        )
        result[f"{first.value}+{second.value}"] = {"change": round(change, 5), "kl": found["kl"], "top1": found["top1"]}
    harness.report_json("phase_quality", args, {"pairs": result})


if __name__ == "__main__":
    main()
