"""Weights in the forms that native products read."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tests.unit.modelfiles.test_gguf_file import random_blocks
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.core.formats import Weights
from disagg.engine.large_pages import LargePages
from disagg.engine.linears import LinearMaker
from disagg.engine.matrix import BLOCK_ELEMENTS, MatrixRows, joined, rows_of, stored_rows
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
        packed = library.pack(rows_of(weight), dtype, LargePages())
        assert torch.equal(packed, padded.view(num_panels, PANEL, inputs).transpose(1, 2))
        assert torch.equal(library.unpack(rows_of(weight), dtype), weight.to(dtype))


def stored(kind: GGMLQuantizationType, outputs: int, inputs: int) -> tuple[MatrixRows, Tensor]:
    """Random rows as a file has them, the last one first, and their values by the reference reader."""
    raw = random_blocks(kind, outputs * inputs)
    values = gguf.quants.dequantize(raw, kind).reshape(outputs, inputs)[::-1].copy()
    order = np.arange(outputs, dtype=np.int64)[::-1]
    return stored_rows(raw.ctypes.data, raw.nbytes // outputs, order, inputs, int(kind), raw), torch.from_numpy(values)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [GGMLQuantizationType(kind) for kind in BLOCK_ELEMENTS], ids=lambda kind: kind.name)
def test_rows_are_read_as_they_are_stored(library: NativeLibrary, kind: GGMLQuantizationType, level: Isa) -> None:
    if library.choose_isa(level) is not level:
        pytest.skip(f"this CPU has no {level.name}")
    for outputs, inputs in [(1, 32), (33, 96), (50, 576)] + ([(3, 41)] if BLOCK_ELEMENTS[kind] == 1 else []):
        rows, values = stored(kind, outputs, inputs)
        assert torch.equal(library.unpack(rows, torch.float32), values)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(
                library.pack(rows, dtype, LargePages()), library.pack(rows_of(values.to(dtype)), dtype, LargePages())
            )
        ours, theirs = (library.pack_int8(each, GROUP, LargePages()) for each in (rows, rows_of(values)))
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.scales, theirs.scales)


def test_a_matrix_may_be_of_rows_stored_unlike(library: NativeLibrary) -> None:
    parts = [stored(GGMLQuantizationType(kind), 7, 64) for kind in BLOCK_ELEMENTS]
    rows, values = joined([rows for rows, _ in parts]), torch.cat([values for _, values in parts])
    assert torch.equal(library.unpack(rows, torch.float32), values)
    with pytest.raises(InternalFault, match=r"\[64, 65\] inputs are no matrix"):
        joined([rows, rows_of(torch.zeros(1, 65))])
    with pytest.raises(InternalFault, match=r"kinds \[99\]"):
        library.unpack(rows._replace(kinds=np.full(rows.num_outputs, 99, np.uint8)), torch.float32)
    with pytest.raises(InternalFault, match=r"torch.int8 .* has no rows"):
        rows_of(torch.zeros(2, 2, dtype=torch.int8))


@pytest.mark.parametrize("group", [GROUP, FINE_GROUP])
def test_int8_weights_are_the_same_on_every_instruction_set(library: NativeLibrary, group: int) -> None:
    for outputs, inputs in SHAPES:
        weight = random_weight(outputs, inputs)
        made = []
        for level in LEVELS:
            if library.choose_isa(level) is level:
                made.append(library.pack_int8(rows_of(weight), group, LargePages()))
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
    error = (unpacked(library.pack_int8(rows_of(weight), group, LargePages()), 1024) - weight).pow(2).mean()
    assert error < 0.5 * (plain(weight, group) - weight).pow(2).mean()


@pytest.mark.parametrize("group", [GROUP, FINE_GROUP])
def test_scales_of_other_weights_are_hardly_worse_than_plain_ones(library: NativeLibrary, group: int) -> None:
    weight = random_weight(64, 8 * group)
    error = (unpacked(library.pack_int8(rows_of(weight), group, LargePages()), 8 * group) - weight).pow(2).mean()
    assert error < 1.02 * (plain(weight, group) - weight).pow(2).mean()


def test_groups_without_a_number_are_zero(library: NativeLibrary) -> None:
    weight = torch.zeros(3, 2 * GROUP)
    weight[1, 0] = 1e-38  # 127 over it is more than a float holds
    weight[2, GROUP] = 2.0
    restored = unpacked(library.pack_int8(rows_of(weight), GROUP, LargePages()), 2 * GROUP)
    assert bool((restored[:2] == 0).all())
    assert restored[2, GROUP] == pytest.approx(2.0, rel=1e-2)


def test_the_head_has_finer_groups(library: NativeLibrary) -> None:
    weight, x = random_weight(128, 512), random_weight(4, 512)
    maker = LinearMaker(Weights.INT8, library)
    exact = x.double() @ weight.double().t()
    errors = [float((maker.make(weight, is_head=is_head)(x) - exact).pow(2).mean()) for is_head in (True, False)]
    assert errors[0] < errors[1]
