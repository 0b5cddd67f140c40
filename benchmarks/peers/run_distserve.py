"""Runner: DistServe's own simulator (`simdistserve`), with its checkout on PYTHONPATH; OPT-13B, one GPU a worker.

    run_distserve.py ROWS.json NUM_PREFILL NUM_DECODE

ROWS.json holds [seconds, prompt tokens, answer tokens] of each request. The last line of output is JSON.
"""

import json
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

import simpy
from simdistserve.base.request import Request
from simdistserve.base.scheduler import put_requests_with_interarrivals
from simdistserve.base.worker import WorkerConfig
from simdistserve.clusters.disagg import DisaggCluster
from simdistserve.constants import ModelTypes
from simdistserve.estimators.memory_estimator import get_max_num_tokens

MODEL = ModelTypes.opt_13b
NO_LIMIT = 10**7


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    num_prefill, num_decode = map(int, sys.argv[2:])
    began_s = time.process_time()
    requests = [
        Request(env=None, req_id=number, prefill_length=prompt, output_lens=output)
        for number, (_, prompt, output) in enumerate(rows)
    ]
    gaps_ms = [0.0, *(1e3 * (after - before) for (before, *_), (after, *_) in pairwise(rows))]
    most_tokens = get_max_num_tokens(MODEL, 1, 1)
    env = simpy.Environment()
    cluster = DisaggCluster(
        env=env,
        N_prefill_instance=num_prefill,
        N_decode_instance=num_decode,
        worker_configs=WorkerConfig(
            model_type=MODEL,
            TP=1,
            TP_Prefill=1,
            TP_Decode=1,
            prefill_max_batch_size=NO_LIMIT,
            decode_max_batch_size=NO_LIMIT,
            prefill_max_tokens=most_tokens,
            decode_max_tokens=most_tokens,
            enable_chunked_prefill=False,
            engine_type="distserve",
        ),
    )
    cluster.run()
    put_requests_with_interarrivals(env, cluster.scheduler, gaps_ms, requests)
    env.run()
    cpu_s = time.process_time() - began_s
    times = [times_of(request) for request in requests]
    found = {
        "cpu_s": cpu_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "ttft_s": [ttft_s for ttft_s, _ in times],
        "tpot_s": [tpot_s for _, tpot_s in times],
    }
    print(json.dumps(found))


def times_of(request: Request) -> tuple[float, float]:
    """TTFT, and seconds per token after it, as its own tools take them from a request's log."""
    first = {}
    for at_ms, event, _ in request.log:
        first.setdefault(event, at_ms)
    token_ms = first["wait_decode"]
    return (token_ms - first["init"]) / 1e3, (first["exit_system"] - token_ms) / request.output_lens / 1e3


if __name__ == "__main__":
    main()
