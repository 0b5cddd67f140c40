"""Every family that is computed natively gives the reference's scores: in chunks, in decode, at stretched positions."""

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from tests.parity.tiny_models import TINY_CONTEXT, TINY_VOCAB, tiny_model, write_gguf
from tests.unit.engine.steps import make_engine, make_row, run
from torch import Tensor
from transformers import PreTrainedModel

from disagg.core.errors import InternalFault
from disagg.core.formats import KvDtype, Weights
from disagg.core.ids import StepId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.engine.native.library import load_library
from disagg.engine.runner import TorchEngine
from disagg.scheduler.engine import Scoring, StepPlan

NUM_TOP = 20
SCORED = SamplingParams(max_tokens=64, temperature=0.0, num_logprobs=NUM_TOP)
BLOCKS = list(range(10, 54))
MAX_DIFFERENCE = 1e-3  # nat, of a log-probability
WINDOW = 96


class Case(NamedTuple):
    """A model, and what its config says of positions."""

    architecture: str
    rope: dict[str, object] | None = None
    num_kv_heads: int = 2


YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 175}
CASES = {
    "llama": Case("llama"),
    "llama without grouped heads": Case("llama", num_kv_heads=6),
    "llama, linear": Case("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama, llama3": Case(
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "llama, yarn": Case("llama", YARN),
    "llama, yarn with its own attention factor": Case("llama", {**YARN, "attention_factor": 0.8}),
    "mistral": Case("mistral"),
    "mistral, one KV head": Case("mistral", num_kv_heads=1),
    "qwen2": Case("qwen2"),
    "qwen2, yarn": Case("qwen2", YARN),
    "qwen3": Case("qwen3"),
    "qwen3, yarn": Case("qwen3", YARN),
}
ALL_CASES = [pytest.param(case, id=name) for name, case in CASES.items()]


def build(case: Case) -> PreTrainedModel:
    return tiny_model(
        case.architecture,
        tie_embeddings=False,
        rope_scaling=None if case.rope is None else dict(case.rope),
        num_kv_heads=case.num_kv_heads,
    )


def reference_scores(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Log-probabilities [len(ids), vocab] of every next token."""
    with torch.inference_mode():
        scores: Tensor = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return scores


def check(token: EmittedToken, expected: Tensor) -> None:
    """The token's logprobs, and those of the likeliest others, are the reference's."""
    assert token.logprobs is not None
    assert math.isclose(token.logprobs.chosen, float(expected[token.token_id]), abs_tol=MAX_DIFFERENCE)
    assert len(token.logprobs.top) == NUM_TOP
    for token_id, score in token.logprobs.top:
        assert math.isclose(score, float(expected[token_id]), abs_tol=MAX_DIFFERENCE)
    assert expected.max() - expected[token.token_id] < 2 * MAX_DIFFERENCE


def read_in_chunks(engine: TorchEngine, ids: list[int], chunk: int, expected: Tensor) -> None:
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        (token,) = run(engine, make_row(0, part, start, BLOCKS, SCORED))
        check(token, expected[start + len(part) - 1])


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return [int(token) for token in torch.randint(TINY_VOCAB, (length,), generator=generator)]


@pytest.mark.parametrize("case", ALL_CASES)
def test_scores_equal_the_reference(tmp_path: Path, case: Case) -> None:
    model = build(case)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.config.max_context == TINY_CONTEXT
    ids = prompt_of(TINY_CONTEXT - 2)
    expected = reference_scores(model, ids)
    read_in_chunks(engine, ids[:690], 300, expected)
    for position in range(690, len(ids)):
        (token,) = run(engine, make_row(0, [ids[position]], position, BLOCKS, SCORED))
        check(token, expected[position])


def test_qwen3_from_gguf_gives_the_references_scores(tmp_path: Path) -> None:
    model = build(CASES["qwen3"])
    engine = make_engine(write_gguf(tmp_path / "model.gguf", model))
    ids = prompt_of(50)
    read_in_chunks(engine, ids, 20, reference_scores(model, ids))


def test_older_spelling_of_rope_gives_the_same_scores(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling with "type"."""
    model = build(CASES["llama, yarn"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    file.write_text(text.replace('"rope_parameters"', '"rope_scaling"').replace('"rope_type"', '"type"'))
    assert file.read_text() != text
    ids = prompt_of(300)
    read_in_chunks(make_engine(tmp_path), ids, 300, reference_scores(model, ids))


def test_a_sliding_window_is_exact_up_to_its_width(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=WINDOW, tie_embeddings=False)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.config.max_context == engine.config.sliding_window == WINDOW
    ids = prompt_of(WINDOW + 1)
    read_in_chunks(engine, ids[:WINDOW], 40, reference_scores(model, ids))
    with pytest.raises(InternalFault, match=f"ends at {WINDOW + 1} tokens, the context is {WINDOW}"):
        run(engine, make_row(0, ids[WINDOW:], WINDOW, BLOCKS, SCORED))


# --- other weights ---------------------------------------------------------------------------------------------------

# Nats, of whole distributions, the mean over a prompt. Random weights are hard to round: real ones lose less.
MAX_KL = {Weights.FP16: 1e-4, Weights.INT8: 2e-2}


@torch.inference_mode()
def kl_to(expected: Tensor, engine: TorchEngine, ids: list[int]) -> float:
    """Mean over the places of a prompt, KV in float16 and read in one go. expected [len(ids), vocab]."""
    row = msgspec.structs.replace(make_row(0, ids, 0, BLOCKS, None), scoring=Scoring(tuple(ids[1:]), TINY_VOCAB))
    (scores,) = engine.run_step(StepPlan(StepId(0), (row,)), lambda num_layers: None).scores
    logs = torch.empty(len(ids) - 1, TINY_VOCAB, dtype=torch.float64)
    for place, each in enumerate(scores.logprobs):
        token_ids, values = zip(*each.top, strict=True)
        logs[place, list(token_ids)] = torch.tensor(values, dtype=torch.float64)
    return float((expected[:-1].exp() * (expected[:-1] - logs)).sum(-1).mean())


@pytest.mark.parametrize("weights", [Weights.FP16, Weights.INT8])
@pytest.mark.parametrize("case", ALL_CASES)
def test_other_weights_stay_near_the_reference(tmp_path: Path, case: Case, weights: Weights) -> None:
    if weights is Weights.INT8 and load_library() is None:
        pytest.skip("int8 needs the native kernels")
    model = build(case)
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path, weights=weights, kv_dtype=KvDtype.FLOAT16)
    ids = prompt_of(300)
    kl = kl_to(reference_scores(model, ids), engine, ids)
    print(f"{case.architecture} {weights.value}: KL {kl:.1e}")
    assert 0 < kl < MAX_KL[weights]


def test_weights_of_six_bits_would_not_pass_for_eight(tmp_path: Path) -> None:
    """So the bound can fail."""
    model = build(CASES["llama"])
    ids = prompt_of(300)
    expected = reference_scores(model, ids)
    with torch.inference_mode():
        for weight in (each for each in model.parameters() if each.dim() == 2):
            scale = weight.abs().amax(-1, keepdim=True) / 31
            weight.copy_((weight / scale).round() * scale)
    model.save_pretrained(tmp_path)
    assert kl_to(expected, make_engine(tmp_path), ids) > MAX_KL[Weights.INT8]
