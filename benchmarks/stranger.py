"""A process that has nothing to do with serving and multiplies matrices of a model's sizes: load on a core, by itself.

python benchmarks/stranger.py MODEL THREADS
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from disagg.channel.lifeline import watch_parent
from disagg.modelfiles.config import read_config
from disagg.modelfiles.fetch import resolve_model
from disagg.testing.processes import MarkedProcess

NUM_ROWS = 512  # tokens in a chunk of a prefill worker
READY = "multiplying"
READY_TIMEOUT_S = 60.0


@contextlib.contextmanager
def stranger(model: str, cores: Sequence[int], num_threads: int) -> Iterator[None]:
    """The process at work on these cores; gone afterwards. Raises InternalFault when it does not start."""
    with MarkedProcess((model, str(num_threads)), program=(sys.executable, __file__)) as process:
        os.sched_setaffinity(process.pid, cores)  # before torch starts threads: they inherit it
        process.wait_line(READY, READY_TIMEOUT_S)
        yield


def multiply(model: str, num_threads: int) -> None:
    """For ever, as a worker that reads prompts does: every layer's weights in turn, a chunk of rows each."""
    torch.set_num_threads(num_threads)
    config = read_config(resolve_model(model))
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    both = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = ((both, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
    layers = [[torch.randn(shape) for shape in shapes] for _ in range(config.num_layers)]
    rows = {num_inputs: torch.randn(NUM_ROWS, num_inputs) for _, num_inputs in shapes}
    print(READY, flush=True)
    with torch.inference_mode():
        while True:
            for weights in layers:
                for weight in weights:
                    torch.nn.functional.linear(rows[weight.shape[1]], weight)


if __name__ == "__main__":
    lifeline = watch_parent()  # ends with the benchmark, even when that is killed
    multiply(sys.argv[1], int(sys.argv[2]))
