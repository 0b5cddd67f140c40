"""A step as tensors on the device."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.engine.attention import AttentionBackend, RowSpan
from disagg.engine.tables import BlockTables

LayerDone = Callable[[int], None]  # called with a layer's index once its keys and values are stored


class StepTensors(NamedTuple):
    """M tokens of all sequences of the step; the scores of S of them are wanted."""

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
    scored: Sequence[tuple[int, int]] = (),
) -> StepTensors:
    """Of at least one span. Scores are wanted of the last token of each span in `sampled`, then of the tokens
    [start, stop) of the step for each of `scored`.
    """
    starts, counts, firsts, rows = np.array(spans, np.int64).T
    positions = np.arange(len(tokens)) + np.repeat(firsts - starts, counts)
    slots = tables.slots(np.repeat(rows, counts), positions, block_size)
    wanted = [start + count - 1 for start, count, _, _ in sampled]
    wanted += chain.from_iterable(range(start, stop) for start, stop in scored)
    return StepTensors(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        sampled=torch.tensor(wanted, dtype=torch.int64, device=device),
        attention=attention.plan(spans),
    )
