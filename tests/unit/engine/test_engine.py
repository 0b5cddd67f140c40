"""The engine against the reference implementation, on tiny models; and plans that cannot be run."""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.parity.tiny_models import TINY_CONTEXT, TINY_VOCAB, tiny_model, write_tiny_model
from tests.unit.engine.steps import GREEDY, generate, make_engine, make_row, run, sequence_id
from transformers import PreTrainedModel

from disagg.core.errors import ConfigurationError, InternalFault, ModelLoadError
from disagg.core.formats import Kernels
from disagg.core.ids import StepId
from disagg.core.request import SamplingParams
from disagg.engine.device import torch_arithmetic
from disagg.engine.model import Llama
from disagg.engine.native.library import load_library
from disagg.engine.step import LayerDone, StepTensors
from disagg.scheduler.engine import StepPlan, StepRow, TokenHistory

NUM_OUTPUTS = 12
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def prompt_of(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(TINY_VOCAB, (length,), generator=generator)]


def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_greedy_tokens_equal_the_reference(tmp_path: Path, architecture: str, tie_embeddings: bool) -> None:
    model = tiny_model(architecture, tie_embeddings=tie_embeddings)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.config.tie_embeddings is tie_embeddings
    assert engine.config.qkv_bias is (architecture == "qwen2")
    for length, chunk in ((1, 99), (37, 16), (150, 64), (150, 150)):
        prompt = prompt_of(length)
        got = generate(engine, prompt, list(range(20, 20 + 11)), NUM_OUTPUTS, chunk=chunk)
        assert got == reference_greedy(model, prompt, NUM_OUTPUTS)
    engine.check_invariants()


def test_scores_equal_the_reference_with_stretched_rope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(rope_scaling=dict(LLAMA3))
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert min(engine.config.rope_factors) == 1.0
    assert max(engine.config.rope_factors) == pytest.approx(8.0)
    seen: list[torch.Tensor] = []
    forward = Llama.forward

    def recorded(model: Llama, step: StepTensors, layer_done: LayerDone | None) -> torch.Tensor:
        seen.append(forward(model, step, layer_done))
        return seen[-1]

    monkeypatch.setattr(Llama, "forward", recorded)
    prompt = prompt_of(300)
    run(engine, make_row(0, prompt, 0, list(range(19))))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-4)


def test_sharded_files_are_read_as_one(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole")
    shards = write_tiny_model(tmp_path / "shards", shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    prompt = prompt_of(20)
    first, second = (generate(make_engine(path), prompt, [0, 1], 4) for path in (whole, shards))
    assert first == second
    next(shards.glob("*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match=r"is missing.*download all"):
        make_engine(shards)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 112', '"intermediate_size": 100'))
    with pytest.raises(ModelLoadError, match=r"gate_proj.*\(112, 72\).*\(100, 72\)"):
        make_engine(tmp_path)


def test_layers_are_reported_in_order_once_their_kv_is_readable(tmp_path: Path) -> None:
    engine = make_engine(write_tiny_model(tmp_path))
    prompt = prompt_of(20)
    readable: list[tuple[int, list[bool]]] = []

    def on_layers(num_layers: int) -> None:
        written = engine.arena.tensor[:, :, 5:7].flatten(2)[..., :20].abs().amin(-1) > 0
        readable.append((num_layers, written.all(1).tolist()))

    plan = StepPlan(StepId(3), (make_row(0, prompt, 0, [5, 6]),), report_every=1)
    result = engine.run_step(plan, on_layers)
    assert readable == [
        (1, [True, False, False]),
        (2, [True, True, False]),
        (3, [True, True, True]),
    ]
    assert result.step_id == 3
    # Without a hand-off too every layer is told: a watchdog wants to know that they move.
    told: list[int] = []
    assert engine.run_step(StepPlan(StepId(4), plan.rows, report_every=0), told.append).tokens == result.tokens
    assert told == [1, 2, 3]


def test_tokens_come_in_the_order_of_the_plan_and_only_where_asked(tmp_path: Path) -> None:
    engine = make_engine(write_tiny_model(tmp_path))
    rows = [
        make_row(0, prompt_of(40, seed=1), 0, [0, 1, 2], GREEDY, 4),
        make_row(1, prompt_of(9, seed=2), 0, [3], None),
        make_row(2, prompt_of(1, seed=3), 0, [4], SamplingParams(max_tokens=4, seed=5, num_logprobs=2)),
    ]
    tokens = run(engine, *rows)
    assert [token.sequence_id for token in tokens] == [sequence_id(0), sequence_id(2)]
    assert tokens[0].position == 4
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs is not None
    assert len(tokens[1].logprobs.top) == 2
    assert run(engine) == ()
    assert run(engine, rows[1]) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "0 tokens at position 0"),
        ({"position": -1}, "position -1"),
        ({"block_table": (0,)}, "1 blocks, 20 tokens need 2"),
        ({"block_table": (0, 120)}, "block 120, the arena has 0 to 119"),
        ({"block_table": (0, -1)}, "the arena has 0 to 119"),
        ({"position": TINY_CONTEXT}, f"ends at {TINY_CONTEXT + 20} tokens, the context is {TINY_CONTEXT}"),
        ({"token_ids": (3, TINY_VOCAB)}, f"the vocabulary has 0 to {TINY_VOCAB - 1}"),
        ({"token_ids": (3, -1)}, "token ids -1 to 3"),
    ],
)
def test_an_impossible_row_names_what_is_wrong(
    shared_engine_path: Path, change: dict[str, object], message: str
) -> None:
    engine = make_engine(shared_engine_path)
    row = msgspec.structs.replace(make_row(0, prompt_of(20), 0, [0, 1]), **change)
    with pytest.raises(InternalFault, match=message):
        run(engine, row)


@pytest.fixture(scope="module")
def shared_engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_settings_that_cannot_work_are_refused(shared_engine_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="num_blocks=0"):
        make_engine(shared_engine_path, num_blocks=0)
    with pytest.raises(ConfigurationError, match="block_size=0"):
        make_engine(shared_engine_path, block_size=0)
    with pytest.raises(ModelLoadError, match="no model at"):
        make_engine(shared_engine_path / "absent")


def test_stale_bytes_in_foreign_blocks_cannot_reach_a_result(shared_engine_path: Path) -> None:
    engine = make_engine(shared_engine_path)
    prompt = prompt_of(21)
    clean = generate(engine, prompt, [3, 4, 5], 6)
    engine.arena.tensor.fill_(float("nan"))
    assert generate(engine, prompt, [3, 4, 5], 6) == clean


@pytest.mark.parametrize(("hidden_size", "is_fitting"), [(96, True), (72, False)])
def test_what_gives_other_bits_has_another_name(tmp_path: Path, hidden_size: int, is_fitting: bool) -> None:
    """Heads of 16 go through the native attention, heads of 12 through torch's: the card says so, with its version."""
    path = write_tiny_model(tmp_path, hidden_size=hidden_size)
    own = torch_arithmetic(torch.device("cpu"))
    assert torch.__version__ in own
    assert make_engine(path, kernels=Kernels.TORCH).arithmetic == f"fp32, {own}"
    library = load_library()
    if library is None:
        pytest.skip("no native kernels here")
    rest = "" if is_fitting else f", attention by {own}"
    assert make_engine(path, kernels=Kernels.PORTABLE).arithmetic == f"fp32, native{rest}"


def test_two_rows_of_one_sequence_cannot_share_a_step(shared_engine_path: Path) -> None:
    row = make_row(0, prompt_of(3), 0, [0])
    with pytest.raises(InternalFault, match="two rows of one sequence"):
        run(make_engine(shared_engine_path), row, row)


def test_penalties_survive_a_move_to_another_engine(tmp_path: Path) -> None:
    """An answer is the same whether one engine counted token by token or another begins in the middle."""
    tiny_model().save_pretrained(tmp_path)
    engine, other = make_engine(tmp_path), make_engine(tmp_path)
    prompt, blocks = prompt_of(20), list(range(6))
    params = SamplingParams(64, temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5)

    def row(answer: list[int], *, is_read_again: bool = False) -> StepRow:
        ids = [*prompt, *answer]
        start = len(ids) - 1 if answer and not is_read_again else 0
        made = make_row(1, ids[start:], start, blocks, params, len(answer))
        return msgspec.structs.replace(made, history=TokenHistory(1, tuple(prompt), tuple(answer)))

    answer: list[int] = []
    while len(answer) < NUM_OUTPUTS:
        answer += [token.token_id for token in run(engine, row(answer))]
    (moved,) = run(other, row(answer[:-1], is_read_again=True))
    assert moved.token_id == answer[-1]
    assert answer != generate(other, prompt, blocks, NUM_OUTPUTS)  # penalties matter here
    assert len(set(answer)) > len(set(generate(other, prompt, blocks, NUM_OUTPUTS)))
    engine.check_invariants()


@pytest.mark.parametrize("history", [None, TokenHistory(1, (1, 2), (3,))])
def test_a_penalty_without_the_tokens_so_far_is_refused(tmp_path: Path, history: TokenHistory | None) -> None:
    tiny_model().save_pretrained(tmp_path)
    row = make_row(1, [1, 2], 0, [0], SamplingParams(4, presence_penalty=1.0))
    with pytest.raises(InternalFault, match="has a penalty on the 0 tokens"):
        run(make_engine(tmp_path), msgspec.structs.replace(row, history=history))
