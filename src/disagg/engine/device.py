"""Which device a worker computes on."""

import torch


def resolve_device(name: str) -> str:
    """`auto` becomes the first CUDA device where there is one, else the CPU; any other name is kept."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
