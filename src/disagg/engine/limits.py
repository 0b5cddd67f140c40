"""What this machine can do at best, measured with torch; one JSON line.

read_gb_s     bytes per second read from memory: the best of a sum and of a matrix-vector product over 1 GiB
gemm_gflop_s  float32 matrix product, 2048 cubed
bf16_gflop_s  bfloat16 matrix product, 512 cubed: shows whether the CPU has units for it
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

NUM_READS = 5
READ_FLOATS = 1 << 28
READ_COLUMNS = 1 << 12


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def gemm_gflop_s(size: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / median_s(lambda: torch.mm(left, right), 5) / 1e9


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    data = torch.ones(READ_FLOATS)
    matrix, vector = data.view(-1, READ_COLUMNS), torch.ones(READ_COLUMNS)
    fastest_s = min(median_s(data.sum, NUM_READS), median_s(lambda: torch.mv(matrix, vector), NUM_READS))
    found = {
        "read_gb_s": data.numel() * data.element_size() / fastest_s / 1e9,
        "gemm_gflop_s": gemm_gflop_s(2048, torch.float32),
        "bf16_gflop_s": gemm_gflop_s(512, torch.bfloat16),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
