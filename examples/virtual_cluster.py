"""A whole cluster in virtual time, on the code that serves: no model, no sockets, the same answer for the same seed.

usage: python examples/virtual_cluster.py [SEED]
"""

import sys

from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.stream import GenerateRequest
from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, PROMPT_TOKENS_RECEIVED
from disagg.testing.virtual import MODEL, VirtualCluster


def main() -> None:
    cluster = VirtualCluster(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    cluster.start_worker("prefill-0", Role.PREFILL)
    cluster.start_worker("decode-0", Role.DECODE)
    cluster.time.run(until=lambda: cluster.is_ready)
    for length in (5, 40, 90):
        prompt = tuple(cluster.time.random.randrange(900) for _ in range(length))
        cluster.submit(GenerateRequest(MODEL, prompt, SamplingParams(max_tokens=8, temperature=0.0)))
    cluster.time.run(until=lambda: cluster.are_all_over)
    for request_id, answer in cluster.answers.items():
        print(f"{request_id}: {len(answer.request.prompt_ids)} prompt tokens -> {answer.tokens[0]}")
    for name, worker in cluster.workers.items():
        counters = worker.scheduler.counters
        sent, received = counters.get(HANDOFFS, "sent"), counters.get(PROMPT_TOKENS_RECEIVED)
        hidden = counters.get(HANDOFF_BYTES, "hidden")
        print(f"{name}: {sent:.0f} hand-offs sent ({hidden:.0f} bytes hidden), {received:.0f} prompt tokens received")
    print(f"{cluster.time.now_s:.3f} virtual seconds")


if __name__ == "__main__":
    main()
