"""Angles of rotary positions, worked out once per model."""

import numpy as np
import torch
from torch import Tensor

from disagg.modelfiles.config import ModelConfig

POSITIONS_PER_PART = 1 << 12  # what one float64 temporary covers


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [max_context, head_dim] of every position's angles, float32; both halves of a row are equal.

    A scaling's attention factor is in both, so that q.k carries its square. Angles are float32 products, as in the
    reference implementation; their cosines are taken in float64 by numpy so that the number of torch threads cannot
    change a bit.
    """
    half = config.head_dim // 2
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.power(config.rope_theta, -exponents.astype(np.float64)).astype(np.float32)
    frequencies /= np.array(config.rope_factors or 1.0, np.float32)
    factor = config.rope_attention_factor
    cos, sin = (np.empty((config.max_context, 2, half), np.float32) for _ in range(2))
    for start in range(0, config.max_context, POSITIONS_PER_PART):
        stop = min(start + POSITIONS_PER_PART, config.max_context)
        positions = np.arange(start, stop, dtype=np.float32)
        angles = np.multiply.outer(positions, frequencies).astype(np.float64)[:, None]
        cos[start:stop], sin[start:stop] = np.cos(angles) * factor, np.sin(angles) * factor
    tables = (torch.from_numpy(table.reshape(-1, config.head_dim)).to(device) for table in (cos, sin))
    return next(tables), next(tables)
