"""Runner: Vidur, with its checkout on PYTHONPATH; Sarathi's scheduler, the least loaded replica, no metrics.

    run_vidur.py ROWS.json COSTS.json NUM_REPLICAS

ROWS.json holds [seconds, prompt tokens, answer tokens] of each request, COSTS.json what steps take (see Costs). Vidur's
own step times come from forests fitted to tables of its kernels; here a formula stands in their place, so that both
simulators play the same steps. Run in a folder that may be written to. The last line of output is JSON.
"""

import csv
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

from vidur.config import (
    ClusterConfig,
    LORGlobalSchedulerConfig,
    MetricsConfig,
    ReplicaConfig,
    SarathiSchedulerConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
)
from vidur.entities import Batch, ExecutionTime, Request
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.execution_time_predictor.base_execution_time_predictor import BaseExecutionTimePredictor
from vidur.scheduler.utils.memory_planner import MemoryPlanner
from vidur.simulator import Simulator
from vidur.types import ExecutionTimePredictorType

NUM_PARTS = 14  # of an execution time between its layers and the scheduling's, all 0 here


class Costs(NamedTuple):
    """Seconds of a step, and the room of a replica."""

    base_s: float
    prompt_token_s: float
    prompt_pair_s: float
    stream_s: float
    context_token_s: float
    chunk_tokens: int
    block_size: int
    num_blocks: int
    max_running: int


COSTS = Costs(**json.loads(Path(sys.argv[2]).read_text()))


class Formula(BaseExecutionTimePredictor):
    """In place of what was fitted to tables."""

    def get_execution_time(self, batch: Batch, pipeline_stage: int) -> ExecutionTime:
        seconds = COSTS.base_s
        for request, num_tokens in zip(batch.requests, batch.num_tokens, strict=True):
            done = request.num_processed_tokens
            if request.is_prefill_complete:
                seconds += COSTS.stream_s + COSTS.context_token_s * done
            else:
                pairs = num_tokens * done + num_tokens * (num_tokens + 1) / 2
                seconds += COSTS.prompt_token_s * num_tokens + COSTS.prompt_pair_s * pairs
        return ExecutionTime(1, *(0.0,) * NUM_PARTS, 1e3 * seconds, 0.0, 0.0, 0.0, 0.0)


Formula.__abstractmethods__ = frozenset()  # the parts that its forests predict one by one


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    with Path("rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
        writer.writerows(rows)
    kind = ExecutionTimePredictorType.RANDOM_FORREST
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, Formula)
    MemoryPlanner.get_max_batch_size = lambda self: COSTS.max_running  # it is 27 for the longest prompts of a trace
    began_s = time.process_time()
    simulator = Simulator(
        SimulationConfig(
            cluster_config=ClusterConfig(
                num_replicas=int(sys.argv[3]),
                replica_config=ReplicaConfig(
                    model_name="meta-llama/Llama-2-70b-hf", tensor_parallel_size=4, network_device="a100_dgx"
                ),
                global_scheduler_config=LORGlobalSchedulerConfig(),
                replica_scheduler_config=SarathiSchedulerConfig(
                    batch_size_cap=COSTS.max_running,
                    block_size=COSTS.block_size,
                    num_blocks=COSTS.num_blocks,
                    chunk_size=COSTS.chunk_tokens,
                ),
            ),
            request_generator_config=TraceRequestGeneratorConfig(trace_file="rows.csv", max_tokens=1 << 17),
            metrics_config=MetricsConfig(write_metrics=False, enable_chrome_trace=False, output_dir="output"),
        )
    )
    requests = [event._request for _, event in sorted(simulator._event_queue, key=lambda item: item[1]._request.id)]
    simulator.run()
    cpu_s = time.process_time() - began_s
    times = [times_of(request) for request in requests]
    found = {
        "cpu_s": cpu_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "ttft_s": [ttft_s for ttft_s, _ in times],
        "tpot_s": [tpot_s for _, tpot_s in times],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # else it draws its plots


def times_of(request: Request) -> tuple[float, float]:
    """TTFT, and seconds per token after it."""
    first_s = request.prefill_completed_at
    return first_s - request.arrived_at, (request.completed_at - first_s) / max(1, request.num_decode_tokens - 1)


if __name__ == "__main__":
    main()
