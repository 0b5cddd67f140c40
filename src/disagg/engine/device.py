"""Which device a worker computes on."""

import torch


def resolve_device(name: str) -> str:
    """`auto` becomes the first CUDA device where there is one, else the CPU; any other name is kept."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_arithmetic(device: torch.device) -> str:
    """Names torch's own products and attention: another version of it, or other vector units, may give other bits."""
    is_cuda = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__} on {where}"
