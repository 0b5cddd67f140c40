"""No row's result depends on the batch or on how a prompt was chunked: every linear, the attention, the whole engine.

Bits are compared. What is checked is printed (pytest -s).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import TINY_VOCAB, write_tiny_model
from tests.unit.engine.steps import GREEDY, generate, make_engine, make_row, run, sequence_id
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.core.formats import Kernels, Weights
from disagg.core.ids import BlockId, StepId
from disagg.core.request import SamplingParams
from disagg.core.spans import KvLayout
from disagg.engine.arena import KvArena
from disagg.engine.attention import AttentionBackend, RowSpan, TiledAttention
from disagg.engine.invariance import MKL_MODE_VARIABLE, MKL_STRICT_MODE, RowRule, find_row_rule, is_row_invariant
from disagg.engine.linears import LinearMaker
from disagg.engine.native.library import Isa, NativeLibrary, load_library
from disagg.engine.native_attention import NativeAttention
from disagg.engine.operations import rotate
from disagg.engine.runner import TorchEngine
from disagg.engine.tables import BlockTables
from disagg.scheduler.engine import LayerRange, StepPlan, StepResult

# (inputs, outputs): qkv, output, gate_up, down, head of SmolLM2-135M; and of tiny models.
BIG_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
HEAD_SHAPE = (576, 49152)
TINY_SHAPES = [(72, 120), (72, 72), (72, 224), (112, 72), (72, 313), (48, 80)]
ALL_SIZES = [*range(1, 65), 100, 128, 256, 512]
CHOICES = (Kernels.TORCH, Kernels.NATIVE)
ALL_CHOICES = (*CHOICES, Kernels.PORTABLE)
SOME_SIZES = [1, 2, 3, 4, 7, 8, 12, 13, 15, 16, 17, 24, 25, 31, 33, 48, 57, 64, 193]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


def set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    library = load_library()
    if library is not None:
        library.set_num_threads(num_threads)


def native() -> NativeLibrary:
    library = load_library()
    if library is None:
        pytest.skip("no native kernels here (no C++ compiler, or not an x86-64 CPU with AVX2)")
    return library


def maker(kernels: Kernels, weights: Weights) -> LinearMaker:
    if kernels is Kernels.TORCH and weights is Weights.INT8:
        pytest.skip("int8 needs the native kernels")
    if kernels is Kernels.TORCH:
        return LinearMaker(weights, None)
    return LinearMaker(weights, native().portable() if kernels is Kernels.PORTABLE else native())


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kernels", ALL_CHOICES)
@pytest.mark.parametrize("weights", Weights)
def test_linears_are_row_invariant(weights: Weights, kernels: Kernels, has_bias: bool, num_threads: int) -> None:
    linears, kind = maker(kernels, weights), f"{kernels.value} {weights.value}"
    for num_inputs, num_outputs in [*TINY_SHAPES, *BIG_SHAPES, *([] if has_bias else [HEAD_SHAPE])]:
        bias = random_tensor(num_outputs) if has_bias else None
        linear = linears.make(random_tensor(num_outputs, num_inputs) * 0.05, bias)
        # Torch picks kernels by the number of rows in ways we do not know; ours change at few known ones.
        sizes = ALL_SIZES if kernels is Kernels.TORCH and num_outputs != HEAD_SHAPE[1] else SOME_SIZES
        x = random_tensor(sizes[-1], num_inputs, seed=1)
        assert is_row_invariant(linear, x, sizes), f"{kind} {num_inputs} -> {num_outputs}"
        print(f"{kind} {num_inputs} -> {num_outputs}, bias {has_bias}, {num_threads} threads: bit-equal")


@pytest.mark.parametrize("kernels", ALL_CHOICES)
@pytest.mark.parametrize("weights", Weights)
def test_linears_give_the_same_bits_with_one_and_two_threads(weights: Weights, kernels: Kernels) -> None:
    """Workers of one pair may have different numbers of cores."""
    before, linears = torch.get_num_threads(), maker(kernels, weights)
    for num_inputs, num_outputs in [*TINY_SHAPES, *BIG_SHAPES]:
        linear = linears.make(random_tensor(num_outputs, num_inputs))
        x = random_tensor(130, num_inputs, seed=1)
        results = []
        for threads in (1, 2):
            set_num_threads(threads)
            results.append([linear(x), linear(x[:1])])
        set_num_threads(before)
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two), f"{num_inputs} -> {num_outputs}"


def test_the_check_can_fail_and_a_rule_can_mend() -> None:
    """A product that sums in another order for few rows must be found out, and padded past it."""
    weight = random_tensor(40, 72)

    def fickle(x: Tensor) -> Tensor:
        if len(x) < 3:
            return (x.flip(1) @ weight.flip(1).t()) * (1 + 1e-6)
        return torch.cat([row @ weight.t() for row in torch.split(x, 1)])

    assert not is_row_invariant(fickle, random_tensor(64, 72), [1, 2, 3])
    assert find_row_rule(fickle, 72, 40) == RowRule(4)

    def hopeless(x: Tensor) -> Tensor:
        return x @ weight.t() + x.sum()

    assert find_row_rule(hopeless, 72, 40) is None


def test_where_no_rule_holds_nothing_exact_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path, "llama", tie_embeddings=True)

    def is_invariant() -> bool:
        return make_engine(path, kernels=Kernels.TORCH).is_row_invariant

    assert is_invariant()
    with monkeypatch.context() as patched:
        patched.setattr("disagg.engine.linears.find_row_rule", lambda multiply, num_inputs, num_outputs: None)
        assert not is_invariant()
    monkeypatch.setattr("disagg.engine.attention.is_row_invariant", lambda function, x, sizes: False)
    assert not is_invariant()


def test_a_rule_cuts_and_pads() -> None:
    seen: list[int] = []

    def multiply(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x * 2

    x = random_tensor(50, 3)
    assert torch.equal(RowRule(16, 24).apply(multiply, x), x * 2)
    assert seen == [24, 24, 16]


@pytest.mark.parametrize("width", [112, 1000, 1536, 37])
def test_elementwise_parts_are_row_invariant(width: int, num_threads: int) -> None:
    sizes = [*range(1, 48), 100, 333]
    cos, sin = random_tensor(512, 1, 12, seed=2), random_tensor(512, 1, 12, seed=3)
    x = random_tensor(512, 3, 12)
    whole = rotate(x, cos, sin)
    assert all(torch.equal(rotate(x[:n], cos[:n], sin[:n]), whole[:n]) for n in sizes)
    weight = random_tensor(width)
    assert is_row_invariant(
        lambda part: torch.nn.functional.rms_norm(part, (width,), weight, 1e-5), random_tensor(512, width), sizes
    )


@pytest.mark.parametrize("width", [112, 1000, 1536, 37])
@pytest.mark.parametrize("kernels", CHOICES)
def test_gates_and_norms_are_row_invariant(kernels: Kernels, width: int, num_threads: int, tmp_path: Path) -> None:
    sizes = [*range(1, 48), 100, 333]
    engine = make_engine(write_tiny_model(tmp_path, "llama", tie_embeddings=True), kernels=kernels)
    operations, weight = engine.operations, random_tensor(width)
    gate = operations.gate if kernels is Kernels.TORCH else native().gate
    assert is_row_invariant(gate, random_tensor(512, 2 * width) * 3, sizes)
    delta = random_tensor(512, width, seed=5)

    def add_norm(part: Tensor) -> Tensor:
        return operations.add_norm(part.clone(), delta[: len(part)] * 0 + 0.5, weight)

    assert is_row_invariant(add_norm, random_tensor(512, width), sizes)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernels", CHOICES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (6, 2, 12), (4, 4, 16), (14, 2, 64), (8, 2, 128), (8, 1, 80)],
)
def test_attention_is_independent_of_batch_and_chunks(
    num_heads: int, num_kv_heads: int, head_dim: int, kernels: Kernels, cache_dtype: str, num_threads: int
) -> None:
    """700 tokens at once; in chunks; token by token; and each token decoded beside seven others of other lengths."""
    if kernels is Kernels.NATIVE and head_dim % 16:
        pytest.skip("the native kernels take head dims in multiples of 16")
    length, block_size = 700, 16
    arena = KvArena(KvLayout(1, num_kv_heads, head_dim, cache_dtype, block_size), 200)
    tables = BlockTables(200)
    attention: AttentionBackend = TiledAttention(arena, tables, num_heads)
    if kernels is Kernels.NATIVE:
        attention = NativeAttention(native(), arena, tables)
    arena.tensor.copy_(random_tensor(*arena.tensor.shape))
    order = np.random.default_rng(0).permutation(200)
    slots = (order[:, None] * block_size + np.arange(block_size)).reshape(-1)
    table_row = tables.place(sequence_id(0), tuple(BlockId(int(block)) for block in order))
    queries = random_tensor(length, num_heads, head_dim, seed=1)

    def attend(pieces: list[tuple[int, int]]) -> Tensor:
        parts = [
            attention.attend(0, queries[a:b], attention.plan([RowSpan(0, b - a, a, table_row)])) for a, b in pieces
        ]
        return torch.cat(parts)

    whole = attend([(0, length)])
    reference = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        arena.tensor[0, 0].flatten(0, 1)[slots[:length]].transpose(0, 1)[None].float(),
        arena.tensor[0, 1].flatten(0, 1)[slots[:length]].transpose(0, 1)[None].float(),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(whole.view(length, num_heads, head_dim), reference[0].transpose(0, 1))
    for step in (7, 64, 150, 511, 699):
        assert torch.equal(attend([(a, min(a + step, length)) for a in range(0, length, step)]), whole), step
    for first in (0, 100, 255, 510):
        positions = sorted({first, first + 1, first + 44, 5, 127, 128, 129, 260, 511, 512, 699})
        spans = [RowSpan(i, 1, p, table_row) for i, p in enumerate(positions)]
        spans.append(RowSpan(len(positions), 30, 200, table_row))
        rows = torch.cat([queries[positions], queries[200:230]])
        assert torch.equal(attention.attend(0, rows, attention.plan(spans)), whole[[*positions, *range(200, 230)]])
    print(f"{kernels.value} attention {num_heads}/{num_kv_heads} x {head_dim}, {num_threads} threads: bit-equal")


ENGINES = [("torch", "fp32", "llama"), ("torch", "fp32", "qwen2"), ("torch", "fp16", "llama")]
ENGINES += [("native", weights.value, family) for weights in Weights for family in ("llama", "qwen2")]
ENGINES += [("portable", "fp32", "llama"), ("portable", "fp16", "llama")]


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    kernels, weights, family = request.param
    if kernels != Kernels.TORCH:
        native()
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), family, tie_embeddings=False, hidden_size=96)
    return make_engine(path, num_blocks=200, kernels=Kernels(kernels), weights=Weights(weights))


def stored(engine: TorchEngine, blocks: list[int], num_tokens: int) -> Tensor:
    return engine.arena.tensor[:, :, blocks].flatten(2, 3)[:, :, :num_tokens].clone()


@pytest.mark.parametrize("weights", Weights)
def test_every_instruction_set_gives_the_same_portable_bits(weights: Weights, tmp_path: Path) -> None:
    """So unlike machines may serve one pool in exact mode: as they are with int8, else with --kernels portable."""
    library = native()
    path = write_tiny_model(tmp_path, "qwen2", tie_embeddings=False, hidden_size=192)
    prompt = [int(t) for t in torch.randint(TINY_VOCAB, (200,), generator=torch.Generator().manual_seed(3))]
    kernels = Kernels.NATIVE if weights is Weights.INT8 else Kernels.PORTABLE
    best, seen = library.isa, []
    try:
        for isa in (isa for isa in Isa if Isa.NONE < isa <= best):
            assert library.choose_isa(isa) is isa
            engine = make_engine(path, num_blocks=20, kernels=kernels, weights=weights)
            assert engine.arithmetic == f"{weights.value}, native"
            tokens = generate(engine, prompt, list(range(15)), 20, chunk=150)
            seen.append((tokens, stored(engine, list(range(15)), 219)))
    finally:
        library.choose_isa(best)
    assert len(seen) == int(best)
    for tokens, kv in seen:
        assert tokens == seen[0][0]
        assert torch.equal(kv, seen[0][1])
    print(f"{weights.value}: bit-equal on {[isa.name for isa in Isa if Isa.NONE < isa <= best]}")


def test_engine_prefill_in_chunks_writes_the_same_bits(engine: TorchEngine) -> None:
    prompt = [int(t) for t in torch.randint(TINY_VOCAB, (290,), generator=torch.Generator().manual_seed(3))]
    blocks = list(range(19))
    tokens = generate(engine, prompt, blocks, 8)
    expected = stored(engine, blocks, len(prompt) + 7)
    for chunk, other_blocks in ((1, list(range(20, 39))), (16, list(range(60, 41, -1))), (100, blocks), (129, blocks)):
        engine.arena.tensor.fill_(float("nan"))
        assert generate(engine, prompt, other_blocks, 8, chunk=chunk) == tokens
        assert torch.equal(stored(engine, other_blocks, len(prompt) + 7), expected), f"chunks of {chunk}"
    # What was decoded, read again as a prompt, is the same KV: a sequence may be recovered by re-prefill.
    run(engine, make_row(0, [*prompt, *tokens[:-1]], 0, blocks))
    assert torch.equal(stored(engine, blocks, len(prompt) + 7), expected)


def test_engine_rows_in_a_batch_of_eight_are_what_they_are_alone(engine: TorchEngine) -> None:
    """Eight sequences of other lengths, greedy and sampled, decoded together beside a neighbour's prefill chunk."""
    generator = torch.Generator().manual_seed(4)
    lengths = [3, 17, 40, 100, 127, 128, 140, 200]
    prompts = [[int(t) for t in torch.randint(TINY_VOCAB, (n,), generator=generator)] for n in lengths]
    params = [GREEDY if i % 2 else SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=i) for i in range(8)]
    num_tokens = 6
    alone = []
    for prompt, sampling in zip(prompts, params, strict=True):
        tokens = generate(engine, prompt, list(range(14)), num_tokens, sampling=sampling)
        alone.append((tokens, stored(engine, list(range(14)), len(prompt) + num_tokens - 1)))
    tables = [list(range(20 * i, 20 * i + 14)) for i in range(8)]
    outputs = [[e.token_id] for e in run(engine, *(make_row(i, prompts[i], 0, tables[i], params[i]) for i in range(8)))]
    for position in range(1, num_tokens):
        rows = [
            make_row(i, outputs[i][-1:], len(prompts[i]) + position - 1, tables[i], params[i], position)
            for i in range(8)
        ]
        noise = make_row(99, prompts[7][: 20 * position], 0, list(range(180, 194)), None)
        for out, event in zip(outputs, run(engine, noise, *rows), strict=True):
            out.append(event.token_id)
    for i, (tokens, kv) in enumerate(alone):
        # Sampled rows differ only through the choice index, which is 0 in both runs.
        assert outputs[i] == tokens, f"sequence {i}"
        assert torch.equal(stored(engine, tables[i], len(prompts[i]) + num_tokens - 1), kv), f"sequence {i}"
    print("engine: alone = in a batch of 8 beside a prefill chunk, tokens and KV bit-equal")


CUTS = [(1, 2, 3), (2, 3), (1, 3), (3,)]  # of three layers: where each part ends


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("length", [1, 40, 200])
def test_engine_layers_run_apart_give_the_same_bits(engine: TorchEngine, length: int, cut: tuple[int, ...]) -> None:
    """A step in parts, between steps of others; each part finds the KV of its own layers only, the rest is NaN."""
    prompt = [int(t) for t in torch.randint(TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(5))]
    params = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3, num_logprobs=4)
    blocks, arena = list(range(14)), engine.arena.tensor
    arena.zero_()
    first = run(engine, make_row(0, prompt, 0, blocks, params))[0].token_id
    landed = arena.clone()
    row = make_row(0, [first], length, blocks, params, 1)
    (whole,) = run(engine, row)
    expected = stored(engine, blocks, length + 1)
    arena.fill_(float("nan"))
    start, carried, result = 0, b"", StepResult(StepId(0), ())
    for stop in cut:
        arena[start:stop] = landed[start:stop]
        part = row if stop == cut[-1] else make_row(0, [first], length, blocks, None, 1)
        result = engine.run_step(
            StepPlan(StepId(stop), (part,), layers=LayerRange(start, stop), carried=carried), lambda _: None
        )
        start, carried = stop, result.carried
        run(engine, make_row(99, prompt, 0, list(range(100, 114))))
    assert result.tokens == (whole,)
    assert torch.equal(stored(engine, blocks, length + 1), expected)


def test_a_part_without_what_was_before_it_is_refused(engine: TorchEngine) -> None:
    row = make_row(0, [3], 0, [0])
    for layers, carried, reason in [
        (LayerRange(1, 2), b"", "0 bytes of rows"),
        (LayerRange(1, 2), bytes(8), "8 bytes of rows"),
        (LayerRange(2, 2), b"", "cannot run apart"),
        (LayerRange(0, 4), b"", "cannot run apart"),
        (LayerRange(-1, 2), b"", "cannot run apart"),
    ]:
        with pytest.raises(InternalFault, match=reason):
            engine.run_step(StepPlan(StepId(0), (row,), layers=layers, carried=carried), lambda _: None)


def test_the_products_mode_is_set_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from disagg.engine import invariance

    monkeypatch.delenv(MKL_MODE_VARIABLE, raising=False)
    invariance.ask_for_strict_mode()
    is_intel = Path("/proc/cpuinfo").is_file() and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert os.environ.get(MKL_MODE_VARIABLE) == (MKL_STRICT_MODE if is_intel else None)
    monkeypatch.setenv(MKL_MODE_VARIABLE, "COMPATIBLE")
    invariance.ask_for_strict_mode()
    assert os.environ[MKL_MODE_VARIABLE] == "COMPATIBLE"
