"""Weights in the forms that native products read."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from disagg.core.formats import Weights
from disagg.engine.linears import LinearMaker
from disagg.engine.native.library import (
    FINE_GROUP,
    GROUP,
    INT8_PANEL,
    PANEL,
    Int8Matrix,
    Isa,
    NativeLibrary,
    load_library,
)

SHAPES = [(1, 1), (33, 7), (64, 576), (100, 100), (17, 65)]  # (outputs, inputs), also ones that end within a panel
LEVELS = [level for level in Isa if level is not Isa.NONE]


@pytest.fixture
def library() -> Iterator[NativeLibrary]:
    found = load_library()
    if found is None:
        pytest.skip("no native kernels here")
    best = found.isa
    yield found
    found.choose_isa(best)


def random_weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))


def unpacked(matrix: Int8Matrix, inputs: int) -> Tensor:
    """[num_outputs, inputs], float64."""
    panels, groups = matrix.scales.shape[:2]
    values = matrix.values.permute(0, 3, 1, 2, 4).reshape(panels * INT8_PANEL, groups, matrix.group)
    scales = matrix.scales.permute(0, 2, 1).reshape(panels * INT8_PANEL, groups, 1)
    return (values.double() * scales).reshape(panels * INT8_PANEL, -1)[: matrix.num_outputs, :inputs]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_panels_hold_every_weight_and_zeros_after_the_last(
    library: NativeLibrary, dtype: torch.dtype, level: Isa
) -> None:
    if library.choose_isa(level) is not level:
        pytest.skip(f"this CPU has no {level.name}")
    for outputs, inputs in SHAPES:
        weight, num_panels = random_weight(outputs, inputs), -(-outputs // PANEL)
        padded = torch.zeros(num_panels * PANEL, inputs, dtype=dtype)
        padded[:outputs] = weight
        assert torch.equal(library.pack(weight, dtype), padded.view(num_panels, PANEL, inputs).transpose(1, 2))


@pytest.mark.parametrize("group", [GROUP, FINE_GROUP])
def test_int8_weights_are_the_same_on_every_instruction_set(library: NativeLibrary, group: int) -> None:
    for outputs, inputs in SHAPES:
        weight = random_weight(outputs, inputs)
        made = []
        for level in LEVELS:
            if library.choose_isa(level) is level:
                made.append(library.pack_int8(weight, group))
        for other in made[1:]:
            assert torch.equal(other.values, made[0].values)
            assert torch.equal(other.scales, made[0].scales)


def plain(weight: Tensor, group: int) -> Tensor:
    """With the largest value of a group at 127, as most formats have it."""
    grouped = weight.view(weight.shape[0], -1, group)
    scales = grouped.abs().amax(-1, keepdim=True) / 127.0
    return ((grouped / scales).round() * scales).view(weight.shape)


@pytest.mark.parametrize("group", [GROUP, FINE_GROUP])
def test_scales_fit_weights_that_were_stored_in_4_bits(library: NativeLibrary, group: int) -> None:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(-8, 8, (64, 1024 // group, group), generator=generator)
    steps = torch.rand(64, 1024 // group, 1, generator=generator)
    weight = (levels * (0.1 + steps)).view(64, 1024)
    error = (unpacked(library.pack_int8(weight, group), 1024) - weight).pow(2).mean()
    assert error < 0.5 * (plain(weight, group) - weight).pow(2).mean()


@pytest.mark.parametrize("group", [GROUP, FINE_GROUP])
def test_scales_of_other_weights_are_hardly_worse_than_plain_ones(library: NativeLibrary, group: int) -> None:
    weight = random_weight(64, 8 * group)
    error = (unpacked(library.pack_int8(weight, group), 8 * group) - weight).pow(2).mean()
    assert error < 1.02 * (plain(weight, group) - weight).pow(2).mean()


def test_groups_without_a_number_are_zero(library: NativeLibrary) -> None:
    weight = torch.zeros(3, 2 * GROUP)
    weight[1, 0] = 1e-38  # 127 over it is more than a float holds
    weight[2, GROUP] = 2.0
    restored = unpacked(library.pack_int8(weight, GROUP), 2 * GROUP)
    assert bool((restored[:2] == 0).all())
    assert restored[2, GROUP] == pytest.approx(2.0, rel=1e-2)


def test_the_head_has_finer_groups(library: NativeLibrary) -> None:
    weight, x = random_weight(128, 512), random_weight(4, 512)
    maker = LinearMaker(Weights.INT8, library)
    exact = x.double() @ weight.double().t()
    errors = [float((maker.make(weight, is_head=is_head)(x) - exact).pow(2).mean()) for is_head in (True, False)]
    assert errors[0] < errors[1]
