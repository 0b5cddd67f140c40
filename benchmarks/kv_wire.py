"""What a compressed wire saves and costs: bytes, time to encode and decode, and what it does to the answer.

usage: python benchmarks/kv_wire.py [--quick]

Pieces of prose are read by one engine and handed to another through the code that workers use, over each wire. Then the
other goes on greedily for 64 tokens; and, along the tokens of the native wire, its scores are compared with those.
Break-even: the speed of a link above which encoding and decoding take longer than the bytes that they save. fp8 is a
candidate that workers do not speak: e4m3 with the same scales and as many bytes as int8.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import harness
from disagg.core.formats import KvDtype, KvWire, Weights
from disagg.core.ids import BlockId
from disagg.core.spans import Span
from disagg.engine.span_conversion import rank_memory
from disagg.kvcache.conversion import Holding, SpanRead, plan_pieces
from disagg.kvcache.memory import Memory
from disagg.modelfiles.fetch import resolve_model
from peers import quality
from phase_quality import BLOCK, NUM_PIECES, PIECE_TOKENS, Side

PROMPT_TOKENS, ANSWER_TOKENS = PIECE_TOKENS // 2, 64
FP8 = "fp8 (candidate)"
LARGEST_FP8 = 448.0


class Moved(NamedTuple):
    """One piece of text on its way."""

    num_bytes: int
    encode_s: float
    decode_s: float


def move(source: Side, target: Side, wire: KvWire) -> list[Moved]:
    """The prompts' KV of all pieces, each as one push. The native wire is a copy: what memory alone takes."""
    reads, _ = rank_memory(source.engine.arena, wire)
    _, coded = rank_memory(target.engine.arena, wire)
    lands_in: Memory = coded or target.engine.arena
    layout, num_blocks, each = source.engine.layout, source.engine.num_blocks, PIECE_TOKENS // BLOCK
    moved = []
    for number in range(NUM_PIECES):
        blocks = tuple(BlockId(number * each + index) for index in range(each))
        holding = Holding(layout, num_blocks, blocks)
        (piece,) = plan_pieces(holding, holding, Span(0, PROMPT_TOKENS, 0, layout.num_layers), wire)
        is_read = isinstance(piece.source, SpanRead)
        started_s = time.perf_counter()
        segments = (reads.open_read(piece.source),) if isinstance(piece.source, SpanRead) else piece.source
        views = reads.gather(segments)
        encoded_s = time.perf_counter()
        landing = lands_in.landing(piece.destination)
        fill(landing.buffers, views)
        filled_s = time.perf_counter()
        landing.commit()
        ended_s = time.perf_counter()
        copy_s = 0.0 if is_read else filled_s - encoded_s
        num_bytes = sum(view.nbytes for view in views)
        moved.append(Moved(num_bytes, encoded_s - started_s + copy_s, ended_s - filled_s))
        if is_read:
            reads.close_read(segments[0])
    return moved


def move_as_fp8(source: Side, target: Side) -> list[Moved]:
    """All rows at once; timed per piece."""
    arena = source.engine.arena.tensor.flatten(0, -2)
    started_s = time.perf_counter()
    scale = torch.maximum(arena.amax(1, keepdim=True), arena.amin(1, keepdim=True).neg_()).clamp_(min=1e-30)
    scale.div_(LARGEST_FP8)
    codes = torch.div(arena, scale).to(torch.float8_e4m3fn)
    encoded_s = time.perf_counter()
    decoded = codes.float().mul_(scale)
    ended_s = time.perf_counter()
    target.engine.arena.tensor.copy_(decoded.view_as(source.engine.arena.tensor))
    share = PROMPT_TOKENS / PIECE_TOKENS / NUM_PIECES  # of the arena's rows
    num_bytes = round(share * (codes.numel() + 4 * scale.numel()))
    return [Moved(num_bytes, share * (encoded_s - started_s), share * (ended_s - encoded_s))]


def fill(buffers: Sequence[memoryview], views: Sequence[memoryview]) -> None:
    """Both are cut alike, or there is one of each."""
    for buffer, view in zip(buffers, views, strict=True):
        buffer[:] = view


def go_on(side: Side, first: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens [places, pieces], scores [places, pieces, vocab]) of the answer; along `forced` where it is given."""
    tokens, scores, token = [], [], first
    for place in range(ANSWER_TOKENS):
        side.read([[int(each)] for each in token], PROMPT_TOKENS + place)
        scores.append(side.scores.clone())
        tokens.append(token)
        token = scores[-1].argmax(-1) if forced is None or place + 1 == ANSWER_TOKENS else forced[place + 1]
    return torch.stack(tokens), torch.stack(scores)


def kl(scores: Tensor, reference: Tensor) -> float:
    """Mean over all places, in nats."""
    logs, wanted = scores.double().log_softmax(-1), reference.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - logs)).sum(-1).mean())


def agreement(tokens: Tensor, native: Tensor) -> dict[str, float]:
    """Share of equal tokens, and of answers that are equal to their end."""
    equal = tokens == native
    return {"same_tokens": float(equal.double().mean()), "same_answers": float(equal.all(0).double().mean())}


def timings(prefill: Side, decode: Side, rounds: int) -> dict[str, dict[str, float]]:
    """Interleaved; medians, in ms per MiB of native KV."""
    ways = ways_of(prefill, decode)
    found: dict[str, list[Moved]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name] += way()
    native_bytes = found[KvWire.NATIVE.value][0].num_bytes
    per_mib = 1e3 * (1 << 20) / native_bytes
    result = {}
    for name, moved in found.items():
        encode_s, decode_s = (statistics.median(each[index] for each in moved) for index in (1, 2))
        saved = native_bytes - moved[0].num_bytes
        result[name] = {
            "bytes_share": moved[0].num_bytes / native_bytes,
            "encode_ms_per_mib": encode_s * per_mib,
            "decode_ms_per_mib": decode_s * per_mib,
            "break_even_mb_s": saved / (encode_s + decode_s) / 1e6 if saved else 0.0,
        }
    return result


def ways_of(prefill: Side, decode: Side) -> dict[str, Callable[[], list[Moved]]]:
    """From one engine's arena into the other's."""
    ways: dict[str, Callable[[], list[Moved]]] = {wire.value: partial(move, prefill, decode, wire) for wire in KvWire}
    return {**ways, FP8: partial(move_as_fp8, prefill, decode)}


def main() -> None:
    args = harness.options(__doc__, rounds=9).parse_args()
    rounds = 2 if args.quick else args.rounds
    print(harness.heading(args))
    torch.set_num_threads(1)
    model = resolve_model(args.model)
    texts = [ids[:PROMPT_TOKENS] for ids in quality.pieces(model, NUM_PIECES, PIECE_TOKENS)]
    print(f"text {quality.digest()}, {NUM_PIECES} pieces of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} more, KV float32")
    prefill, decode = (Side(model, Weights.FP32, KvDtype.FLOAT32) for _ in range(2))
    prefill.read(texts, 0)
    first = prefill.scores.argmax(-1)
    result = timings(prefill, decode, rounds)
    print(f"{'wire':16} {'bytes':>7} {'encode':>8} {'decode':>8} {'even at':>9} {'same':>7} {'whole':>8} {'KL':>8}")
    print(f"{'':16} {'':7} {'ms/MiB':>8} {'ms/MiB':>8} {'MB/s':>9} {'tokens':>7} {'answers':>8} {'nats':>8}")
    native = reference = torch.empty(0)
    for name, way in ways_of(prefill, decode).items():
        way()
        tokens, scores = go_on(decode, first)
        if name == KvWire.NATIVE.value:
            native, reference = tokens, scores
        else:
            _, scores = go_on(decode, first, forced=native)
        found = result[name] | agreement(tokens, native) | {"kl": kl(scores, reference)}
        print(
            f"{name:16} {100 * found['bytes_share']:6.1f}% {found['encode_ms_per_mib']:8.2f}"
            f" {found['decode_ms_per_mib']:8.2f} {found['break_even_mb_s']:9.0f} {100 * found['same_tokens']:6.1f}%"
            f" {100 * found['same_answers']:7.1f}% {found['kl']:8.1e}",
            flush=True,
        )
        result[name] = {key: float(f"{value:.4g}") for key, value in found.items()}
    harness.report_json("kv_wire", args, {"wires": result})


if __name__ == "__main__":
    main()
