"""Float products in bf16 tiles: as near to exact sums as plain float32 is, each row on its own, bit for bit."""

import pytest
import torch
from torch import Tensor

from disagg.core.formats import Kernels, Weights
from disagg.engine.linears import LinearMaker
from disagg.engine.native.library import Isa, NativeLibrary, choose_library, load_library

# (inputs, outputs): of SmolLM2-135M, and ones that end within a tile, a pair, a panel.
SHAPES = [(576, 960), (1536, 576), (72, 313), (577, 65), (33, 17), (31, 32), (2, 1), (1, 5)]
ROWS = [*range(1, 41), 100, 512]
FLOATS = (Weights.FP16, Weights.FP32)
NORMAL = 2.0**-126  # the smallest number that tiles do not take for 0


@pytest.fixture
def library() -> NativeLibrary:
    found = load_library()
    if found is None or found.isa < Isa.AMX_BF16:
        pytest.skip("this CPU has no AMX with bfloat16, or there are no native kernels here")
    return found


def random_tensor(*shape: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal numbers, times 2 to a random power of up to `spread` either way."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*shape, generator=generator)
    return numbers * torch.exp2((torch.rand(*shape, generator=generator) * 2 - 1) * spread)


def stored(weight: Tensor, weights: Weights) -> Tensor:
    """What is kept of a weight, as float64."""
    return weight.to(torch.float16 if weights is Weights.FP16 else torch.float32).double()


def relative_error(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Against float64, over the sum of magnitudes that were added."""
    exact = x.double() @ weight.t() + bias.double()
    return (y.double() - exact) / (x.double().abs() @ weight.abs().t() + bias.double().abs() + 1e-300)


@pytest.mark.parametrize("spread", [0.0, 6.0])
@pytest.mark.parametrize("weights", FLOATS)
def test_errors_are_those_of_float32(library: NativeLibrary, weights: Weights, spread: float) -> None:
    for num_inputs, num_outputs in SHAPES:
        weight, bias = random_tensor(num_outputs, num_inputs, spread=spread) * 0.05, random_tensor(num_outputs, seed=1)
        x = random_tensor(130, num_inputs, seed=2, spread=spread)
        errors = []
        for kernels in (library, library.portable()):
            y = LinearMaker(weights, kernels).make(weight, bias)(x)
            error = relative_error(y, x, stored(weight, weights), bias)
            errors.append((error.abs().max().item(), error.pow(2).mean().sqrt().item(), error.mean().item()))
        (tiles_max, tiles_rms, tiles_mean), (plain_max, plain_rms, plain_mean) = errors
        print(
            f"{weights.value} {num_inputs} -> {num_outputs}, spread {spread:g}, max, rms, mean: "
            f"in tiles {tiles_max:.2e} {tiles_rms:.2e} {tiles_mean:.1e}, "
            f"plain {plain_max:.2e} {plain_rms:.2e} {plain_mean:.1e}"
        )
        assert tiles_max <= max(plain_max, 2.0**-21)  # where few numbers are added, what is left out weighs more
        assert tiles_rms <= max(plain_rms, 2.0**-23)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("weights", FLOATS)
def test_a_row_is_the_same_alone_and_among_others(library: NativeLibrary, weights: Weights, num_threads: int) -> None:
    library.set_num_threads(num_threads)
    try:
        for num_inputs, num_outputs in SHAPES[2:]:
            linear = LinearMaker(weights, library).make(
                random_tensor(num_outputs, num_inputs), random_tensor(num_outputs)
            )
            x = random_tensor(ROWS[-1] + 7, num_inputs, seed=1)
            whole = linear(x)
            for count in ROWS:
                first = count % 8
                assert torch.equal(linear(x[first : first + count]), whole[first : first + count]), count
    finally:
        library.set_num_threads(torch.get_num_threads())


@pytest.mark.parametrize("weights", FLOATS)
def test_one_and_two_threads_give_the_same_bits(library: NativeLibrary, weights: Weights) -> None:
    linear = LinearMaker(weights, library).make(random_tensor(960, 577))
    results = []
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        results.append([linear(random_tensor(count, 577, seed=3)) for count in (1, 16, 17, 200)])
    library.set_num_threads(torch.get_num_threads())
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_small_float16_weights_are_exact(library: NativeLibrary) -> None:
    """Those below 2^-14 have fewer bits; their parts are ordinary bfloat16."""
    weight = torch.arange(-1024, 1024).reshape(16, 128) * 2.0**-24
    y = LinearMaker(Weights.FP16, library).make(weight)(torch.eye(128))
    assert torch.equal(y, weight.t())


@pytest.mark.parametrize("weights", FLOATS)
def test_zeros_and_the_smallest_numbers(library: NativeLibrary, weights: Weights) -> None:
    linear = LinearMaker(weights, library).make(torch.full((40, 50), 0.5))
    assert torch.equal(linear(torch.zeros(20, 50)), torch.zeros(20, 40))
    tiny = torch.full((20, 50), NORMAL / 2)
    assert (linear(tiny).abs() <= tiny.sum(1, keepdim=True)).all()
    small = torch.full((20, 50), 1.1 * 2.0**-100)
    assert torch.allclose(linear(small), small.sum(1, keepdim=True).expand(-1, 40) * 0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weights", FLOATS)
def test_what_is_not_finite_stays_in_its_row_and_column(library: NativeLibrary, weights: Weights) -> None:
    weight, x = random_tensor(70, 50), random_tensor(40, 50, seed=1)
    expected = LinearMaker(weights, library).make(weight)(x)
    x[3, 7], x[20, 0], x[33, 49] = float("inf"), float("nan"), -float("inf")
    weight[5, 5], weight[69, 6] = float("inf"), float("nan")
    y = LinearMaker(weights, library).make(weight)(x)
    rows, columns = [3, 20, 33], [5, 69]
    assert not y[rows].isfinite().any()
    assert not y[:, columns].isfinite().any()
    others = [i for i in range(40) if i not in rows], [i for i in range(70) if i not in columns]
    assert torch.equal(y[others[0]][:, others[1]], expected[others[0]][:, others[1]])


def test_the_largest_numbers_do_not_overflow(library: NativeLibrary) -> None:
    most = torch.finfo(torch.float32).max
    y = LinearMaker(Weights.FP32, library).make(torch.full((3, 1), 0.5))(torch.full((2, 1), most))
    assert torch.allclose(y, torch.full((2, 3), most / 2), rtol=1e-6)


def test_the_two_arithmetics_have_names_and_can_be_chosen(library: NativeLibrary) -> None:
    device = torch.device("cpu")
    for kernels, name in ((Kernels.AUTO, "native in bf16 tiles"), (Kernels.PORTABLE, "native")):
        chosen = choose_library(kernels, device)
        assert chosen is not None
        assert chosen.arithmetic == name
    try:
        library.choose_isa(Isa.AMX)
        assert library.arithmetic == "native"
    finally:
        library.choose_isa(Isa.AMX_BF16)
