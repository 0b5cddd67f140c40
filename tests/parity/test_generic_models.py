"""Decoders that the library computes over our KV arena give the library's own scores; others are refused by name."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.parity.generic_models import REFUSED, SERVED, WINDOW, build
from tests.unit.engine.steps import make_engine, make_row, sequence_id
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

from disagg.core.errors import ConfigurationError, InternalFault, ModelLoadError, NotNative
from disagg.core.ids import BlockId, StepId
from disagg.core.roles import Numerics, Role
from disagg.engine.arena import KvArena
from disagg.engine.attention import RowSpan, TiledAttention
from disagg.engine.generic import GenericDecoder, describe_model
from disagg.engine.step import make_step
from disagg.engine.tables import BlockTables
from disagg.modelfiles.config import read_config
from disagg.scheduler.engine import LayerRange, StepPlan
from disagg.testing.tokenizer_files import write_tiny_tokenizer
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import load_engine

BLOCK = 16
NUM_BLOCKS = 24
CHUNK = 64


class Rig:
    """A decoder, and two sequences in scattered blocks."""

    def __init__(self, path: Path, num_blocks: int = NUM_BLOCKS) -> None:
        self.config = describe_model(path)
        self.arena = KvArena(self.config.kv_layout(BLOCK), num_blocks)
        self.tables = BlockTables(num_blocks)
        self.attention = TiledAttention(self.arena, self.tables, self.config.num_heads, 2)
        with torch.inference_mode():
            self.decoder = GenericDecoder(self.config, path, self.arena, self.tables, self.attention)
        self.arena.tensor.fill_(float("nan"))  # nothing may depend on what the check at the start has left
        self.layers: list[int] = []
        blocks = tuple(BlockId(int(block)) for block in np.random.default_rng(0).permutation(num_blocks))
        self._blocks = blocks[: num_blocks * 3 // 4], blocks[num_blocks * 3 // 4 :]

    @torch.inference_mode()
    def step(self, rows: list[tuple[int, list[int], int]]) -> Tensor:
        """Rows (sequence, tokens, position of the first) -> scores of each row's last token."""
        spans: list[RowSpan] = []
        for sequence, tokens, position in rows:
            start = spans[-1].start + spans[-1].num_tokens if spans else 0
            table_row = self.tables.place(sequence_id(sequence), self._blocks[sequence])
            spans.append(RowSpan(start, len(tokens), position, table_row))
        self.layers.clear()
        ids = np.array([token for _, tokens, _ in rows for token in tokens], np.int64)
        step = make_step(ids, spans, spans, self.tables, BLOCK, self.attention, torch.device("cpu"))
        return self.decoder.forward(step, self.layers.append)


def tokens_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 313, length)]


@pytest.mark.parametrize("name", SERVED)
def test_scores_equal_the_librarys(tmp_path: Path, name: str) -> None:
    model = build(SERVED[name]())
    model.save_pretrained(tmp_path)
    rig = Rig(tmp_path)
    assert not rig.config.is_native
    assert not rig.decoder.is_row_invariant
    long = tokens_of(min(150, rig.config.max_context), seed=1)
    short = tokens_of(24, seed=2)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).logits[0] for ids in (long, short)]
    num_first = len(long) - 3
    for start in range(0, num_first - 5, CHUNK):
        part = long[start : min(start + CHUNK, num_first - 5)]
        got = rig.step([(0, part, start)])
        close(got[0], expected[0][start + len(part) - 1])
        assert rig.layers == [0, 1, 2]
    got = rig.step([(0, long[num_first - 5 : num_first], num_first - 5), (1, short[:21], 0)])
    close(got[0], expected[0][num_first - 1])
    close(got[1], expected[1][20])
    for index in range(3):
        got = rig.step([(1, [short[21 + index]], 21 + index), (0, [long[num_first + index]], num_first + index)])
        close(got[0], expected[1][21 + index])
        close(got[1], expected[0][num_first + index])
    rig.decoder.check_invariants()
    rig.arena.check_invariants()


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    build(make()).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message) as caught:
        Rig(tmp_path)
    assert "\n" not in str(caught.value)


def test_encoders_unknown_kinds_and_damaged_files_are_refused(tmp_path: Path) -> None:
    encoder = T5ForConditionalGeneration(T5Config(vocab_size=313, d_model=64, num_layers=2, num_heads=4, d_ff=96))
    encoder.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"an encoder beside its decoder \(T5For"):
        describe_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Eliza"], "model_type": "eliza"}')
    with pytest.raises(ModelLoadError, match=r"transformers .* cannot read .*config\.json"):
        describe_model(tmp_path)
    olmo = tmp_path / "olmo"
    build(SERVED["olmo2"]()).save_pretrained(olmo)
    config = (olmo / "config.json").read_text()
    (olmo / "config.json").write_text(config.replace("Olmo2ForCausalLM", "OlmoForCausalLM"))
    with pytest.raises(ModelLoadError, match="'OlmoForCausalLM', no decoder that transformers"):
        describe_model(olmo)
    (olmo / "config.json").write_text(
        config.replace('"max_position_embeddings": 400', '"max_position_embeddings": null')
    )
    with pytest.raises(ModelLoadError, match=r"names no max_position_embeddings|cannot read"):
        describe_model(olmo)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    model = build(SERVED["olmo2"]())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = tokens_of(9, seed=1)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    close(Rig(tmp_path).step([(0, ids, 0)])[0], expected)


def test_missing_and_unfitting_tensors_are_refused(tmp_path: Path) -> None:
    model = build(SERVED["olmo2"]())
    whole = model.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    model.save_pretrained(tmp_path, state_dict={key: value for key, value in whole.items() if key != name})
    with pytest.raises(ModelLoadError, match=r"no fitting tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Rig(tmp_path)
    model.save_pretrained(tmp_path, state_dict={**whole, name: torch.zeros(3, 3)})
    with pytest.raises(ModelLoadError, match=r"no fitting tensor .*up_proj|cannot load .*: RuntimeError"):
        Rig(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"transformers cannot load .*: SafetensorError"):
        Rig(tmp_path)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"transformers cannot load .*: OSError"):
        Rig(tmp_path)


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(SERVED["olmo2"]()).save_pretrained(tmp_path)
    plain = Olmo2MLP.forward

    def mixed(self: Olmo2MLP, x: Tensor) -> Tensor:
        mixed: Tensor = plain(self, x) + 0.1 * x.roll(1, dims=1)
        return mixed

    monkeypatch.setattr(Olmo2MLP, "forward", mixed)
    with pytest.raises(ModelLoadError, match=r"Olmo2ForCausalLM .* gives other scores .* outside of plain attention"):
        Rig(tmp_path)


def test_heads_that_the_config_does_not_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(SERVED["olmo2"]()).save_pretrained(tmp_path)
    monkeypatch.setattr("disagg.engine.generic._num_kv_heads", lambda config, num_heads: num_heads)
    with pytest.raises(ModelLoadError, match=r"layer 0 .* attends with \(4, 2, 2\) heads of \[16\], its config says"):
        Rig(tmp_path)


def test_windows_and_stretched_rope_end_the_context(tmp_path: Path) -> None:
    for name, context in (("gemma3, windows", WINDOW), ("phi3, longrope", 128), ("olmo2", 400)):
        build(SERVED[name]()).save_pretrained(tmp_path / name)
        assert describe_model(tmp_path / name).max_context == context
    assert describe_model(tmp_path / "gemma3, windows").sliding_window == WINDOW


def test_without_the_library_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(SERVED["gpt2"]()).save_pretrained(tmp_path)
    with pytest.raises(NotNative, match="'GPT2LMHeadModel'"):
        read_config(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelLoadError, match=r"'GPT2LMHeadModel' .* need transformers: pip install 'disagg\[transfor"):
        describe_model(tmp_path)


def test_native_models_never_ask_the_library(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert describe_model(tiny_llama_path) == read_config(tiny_llama_path)
    assert describe_model(tiny_llama_path).is_native
    make_engine(tiny_llama_path).check_invariants()


def test_faults_of_the_caller_are_told(tmp_path: Path) -> None:
    build(SERVED["gpt2"]()).save_pretrained(tmp_path)
    rig = Rig(tmp_path)
    rig.decoder._model.set_attn_implementation("eager")
    with pytest.raises(InternalFault, match="attention is 'eager'"):
        rig.decoder.check_invariants()
    arena, tables = KvArena(rig.config.kv_layout(2), 5), BlockTables(5)
    with pytest.raises(ConfigurationError, match=r"arena of 10 tokens is too small .* at least \d+"):
        GenericDecoder(rig.config, tmp_path, arena, tables, TiledAttention(arena, tables, 4, 2))


def test_its_layers_cannot_run_apart(tmp_path: Path) -> None:
    """So a worker of such a model begins no first step early."""
    build(SERVED[next(iter(SERVED))]()).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert not engine.runs_layers_apart
    plan = StepPlan(StepId(0), (make_row(0, [3], 0, [0]),), layers=LayerRange(0, 1))
    with pytest.raises(InternalFault, match=r"cannot run apart; run whole steps \(--partial-start off\)"):
        engine.run_step(plan, lambda _: None)


def test_exact_numerics_cannot_be_promised(tmp_path: Path) -> None:
    build(SERVED["olmo2"]()).save_pretrained(tmp_path)
    write_tiny_tokenizer(tmp_path)
    config = WorkerConfig(
        model="m", served_name="m", role=Role.MIXED, worker_id="w", router_address="", num_blocks=NUM_BLOCKS
    )
    with pytest.raises(ConfigurationError, match=r"Olmo2ForCausalLM is not native here, .* add --numerics bounded"):
        load_engine(config, tmp_path)
    bounded = msgspec.structs.replace(config, numerics=Numerics.BOUNDED)
    assert load_engine(bounded, tmp_path).pool.numerics is Numerics.BOUNDED
