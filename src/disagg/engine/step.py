"""A step as tensors on the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.engine.attention import AttentionBackend, RowSpan
from disagg.engine.tables import BlockTables

LayerDone = Callable[[int], None]  # called with a layer's index once its keys and values are stored


class StepTensors(NamedTuple):
    """M tokens of all sequences of the step, S of them sampled."""

    tokens: Tensor  # [M] token ids
    positions: Tensor  # [M]
    slots: Tensor  # [M] where each token's KV goes
    sampled: Tensor  # [S] rows whose vocabulary scores are wanted
    attention: object  # the attention back end's own plan


def make_step(
    tokens: npt.NDArray[np.int64],
    spans: Sequence[RowSpan],
    sampled: Sequence[RowSpan],
    tables: BlockTables,
    block_size: int,
    attention: AttentionBackend,
    device: torch.device,
) -> StepTensors:
    """Of at least one span; the last token of each span in `sampled` is sampled."""
    starts, counts, firsts, rows = np.array(spans, np.int64).T
    positions = np.arange(len(tokens)) + np.repeat(firsts - starts, counts)
    slots = tables.slots(np.repeat(rows, counts), positions, block_size)
    return StepTensors(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        sampled=torch.tensor([start + count - 1 for start, count, _, _ in sampled], dtype=torch.int64, device=device),
        attention=attention.plan(spans),
    )
