"""Rooflines: what must hold whatever the values are, and what fits."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.efficiency import EngineOverhead
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.roofline import ExpertParallel, RooflineModel
from disagg.sim.hardware.step_model import StepModel, StepShape

H100 = catalogue.accelerator("h100")
MODELS = ("Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3", "gpt-oss-20b", "OPT-13B")
SPREAD = ExpertParallel(32, catalogue.link("IB-NDR"), num_redundant=32)
WORKERS = [
    *(RooflineModel(catalogue.model_shape(name), H100) for name in MODELS),
    *(RooflineModel(catalogue.model_shape(name), H100, tp=4, pp=3) for name in MODELS),
    RooflineModel(catalogue.model_shape("DeepSeek-V3"), H100, weights=Precision.FP8, experts=SPREAD),
]
PROMPTS = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=4)
SLACK = 1 + 1e-9


def shape_of(prompts: list[tuple[int, int]], streams: int, context: int) -> StepShape:
    return StepShape(tuple(prompts), streams * context, streams)


@pytest.mark.parametrize("worker", WORKERS, ids=lambda worker: worker.name)
@given(
    prompts=PROMPTS,
    streams=st.integers(0, 300),
    context=st.integers(1, 5000),
    more=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_a_step_that_does_more_is_never_faster(
    worker: RooflineModel, prompts: list[tuple[int, int]], streams: int, context: int, more: tuple[int, int]
) -> None:
    less = worker.step_s(shape_of(prompts, streams, context))
    assert less >= 0
    assert worker.step_s(shape_of([*prompts, (1 + more[0], more[1])], streams, context)) * SLACK >= less
    assert worker.step_s(shape_of(prompts, streams + more[0], context)) * SLACK >= less
    assert worker.step_s(shape_of(prompts, streams, context + more[1])) * SLACK >= less
    if prompts:
        (new, cached), *rest = prompts
        assert worker.step_s(shape_of([(new + more[0], cached + more[1]), *rest], streams, context)) * SLACK >= less


@given(prompts=PROMPTS, streams=st.integers(0, 300), context=st.integers(1, 5000))
def test_more_devices_never_slow_pure_computing(prompts: list[tuple[int, int]], streams: int, context: int) -> None:
    shares = msgspec.structs.replace(catalogue.efficiency("hopper"), all_reduce_s=0.0, all_reduce=1e12)
    shape = shape_of(prompts, streams, context)
    times = [
        RooflineModel(catalogue.model_shape("Llama-3.1-8B"), H100, tp=tp, efficiency=shares).step_s(shape)
        for tp in (1, 2, 4, 8)
    ]
    assert all(wider <= narrower * SLACK for narrower, wider in itertools.pairwise(times))


def test_an_empty_step_takes_no_time() -> None:
    assert [worker.step_s(StepShape()) for worker in WORKERS] == [0.0] * len(WORKERS)


def test_a_long_prompt_takes_about_its_arithmetic() -> None:
    shape = catalogue.model_shape("Llama-3.1-8B")
    seconds = RooflineModel(shape, H100).step_s(StepShape(((8192, 0),)))
    floor = shape.prefill_flops(8192) / H100.flops_s(Precision.BF16)
    assert floor < seconds < 2 * floor


def test_one_stream_takes_about_the_reading_of_the_weights() -> None:
    shape = catalogue.model_shape("Llama-3.1-8B")
    seconds = RooflineModel(shape, H100).step_s(StepShape((), 100, 1))
    floor = shape.decode_bytes(100, 1, Precision.BF16, Precision.BF16) / H100.memory_bytes_s
    assert floor < seconds < 1.6 * floor


def test_narrow_weights_decode_faster() -> None:
    shape, step = catalogue.model_shape("Llama-3.1-70B"), StepShape((), 1000, 1)
    wide, narrow = (RooflineModel(shape, H100, tp=4, weights=w).step_s(step) for w in (Precision.BF16, Precision.FP8))
    assert 0.5 < narrow / wide < 0.75


def test_mixture_of_experts_reads_more_with_more_streams() -> None:
    worker = RooflineModel(catalogue.model_shape("Mixtral-8x7B"), H100, tp=2)
    one, many = (worker.step_s(StepShape((), n, n)) for n in (1, 32))
    assert many > 2.5 * one  # 8 experts instead of 2
    dense = RooflineModel(catalogue.model_shape("Llama-3.1-8B"), H100)
    assert dense.step_s(StepShape((), 32, 32)) < 1.2 * dense.step_s(StepShape((), 1, 1))


def test_stages_cost_a_bubble_on_prompts_and_save_nothing_on_one_stream() -> None:
    shape, prompt, stream = catalogue.model_shape("Llama-3.1-70B"), StepShape(((8192, 0),)), StepShape((), 100, 1)
    flat, staged = (RooflineModel(shape, H100, tp=4, pp=pp) for pp in (1, 4))
    assert flat.step_s(prompt) / 4 < staged.step_s(prompt) < flat.step_s(prompt)
    assert staged.step_s(stream) == pytest.approx(flat.step_s(stream), rel=0.02)


def test_experts_elsewhere_hide_the_exchange_or_not() -> None:
    shape, step = catalogue.model_shape("DeepSeek-V3"), StepShape((), 256 * 2000, 256)

    def seconds(**change: object) -> float:
        spread = msgspec.structs.replace(SPREAD, **change)
        return RooflineModel(shape, H100, weights=Precision.FP8, experts=spread).step_s(step)

    assert seconds() < seconds(is_overlapped=False)
    assert seconds(is_overlapped=False, link=catalogue.link("IB-HDR")) > seconds(is_overlapped=False)
    assert seconds(is_overlapped=False, num_nodes=2) < seconds(is_overlapped=False)


def test_what_an_engine_adds_is_added() -> None:
    shape, step = catalogue.model_shape("Llama-3.1-8B"), StepShape(((100, 0),), 200, 2)
    added = EngineOverhead("x", step_s=1.0, row_s=0.1, prompt_token_s=0.01)
    plain, heavy = RooflineModel(shape, H100), RooflineModel(shape, H100, overhead=added)
    assert heavy.step_s(step) - plain.step_s(step) == pytest.approx(1 + 0.3 + 1)


def test_ranks_beyond_the_kv_heads_keep_copies() -> None:
    shape = catalogue.model_shape("Qwen3-235B-A22B")
    assert [RooflineModel(shape, H100, tp=tp).kv_copies for tp in (2, 4, 8)] == [1.0, 1.0, 2.0]
    assert RooflineModel(catalogue.model_shape("DeepSeek-V3"), H100, tp=8).kv_copies == 8.0


def test_kv_room_is_what_weights_leave_in_whole_blocks() -> None:
    worker = RooflineModel(catalogue.model_shape("Llama-3.1-8B"), H100)
    room = H100.memory_bytes * 0.9 - 1e9 - 2 * worker.model.num_parameters
    assert worker.max_kv_tokens(16) == int(room / 131_072) // 16 * 16
    assert worker.max_kv_tokens(1000) % 1000 == 0


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    worker = RooflineModel(catalogue.model_shape("Llama-3.1-70B"), H100)
    missing = 2 * worker.model.num_parameters - (H100.memory_bytes * 0.9 - 1e9)
    with pytest.raises(ConfigurationError, match=rf"{missing / 1e9:.1f} GB too much"):
        worker.max_kv_tokens(16)
    RooflineModel(worker.model, H100, tp=4).max_kv_tokens(16)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Llama-3.1-8B", {"tp": 3}, "32 heads .* tp=3"),
        ("Llama-3.1-8B", {"pp": 33}, "32 layers"),
        ("Llama-3.1-8B", {"tp": 0}, "at least 1"),
        ("Llama-3.1-8B", {"experts": SPREAD}, "mixture of experts"),
    ],
)
def test_cuts_that_cannot_be_are_refused(name: str, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RooflineModel(catalogue.model_shape(name), H100, **change)  # type: ignore[arg-type]


def test_it_is_a_step_model() -> None:
    model: StepModel = WORKERS[0]
    assert model.num_layers == 32
    assert "Llama-3.1-8B" in model.name
