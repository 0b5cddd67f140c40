"""How long does a client wait when the worker that writes its answer dies?

A stream on 1 prefill and 2 decode workers; the decode worker at work is killed with SIGKILL, or stopped with SIGSTOP.

  detection   from the signal until the router does not know the worker any more
  pause       the longest gap between two tokens of that stream
  re-read     what must be done meanwhile, measured undisturbed: time to first token of a prompt as long as prompt and
              answer were at that moment, with the prompt in the prefix index of the prefill worker

usage: python benchmarks/recovery.py [--rounds N] [--seed N] [--json PATH]
"""

import os
import random
import signal
import threading
import time
from itertools import pairwise

import httpx

import harness
from disagg.core.errors import InternalFault
from disagg.testing.processes import Serve, wait_until

NAME = "smollm2"
PROMPT_TOKENS = 256
KILL_AFTER = 20  # tokens
ANSWER_TOKENS = 48
BEAT_INTERVAL_S = 2.5
TIMEOUT_S = 120.0


class Run:
    """One server, many deaths."""

    def __init__(self, serve: Serve, rng: random.Random) -> None:
        self._serve = serve
        self._random = rng
        self._client = httpx.Client(base_url=serve.url, timeout=TIMEOUT_S, trust_env=False)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(num_tokens)]

    def stream(self, prompt: list[int], max_tokens: int, on_token: dict[int, threading.Event]) -> list[float]:
        """Times at which pieces came."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        times = [time.monotonic()]
        with self._client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
            for line in response.iter_lines():
                if "error" in line:
                    raise InternalFault(f"the answer broke: {line}")
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                    if len(times) - 1 in on_token:
                        on_token[len(times) - 1].set()
        return times

    def workers(self) -> dict[str, int]:
        """Sequences that each registered worker runs."""
        workers = self._client.get("/cluster").json()["workers"]
        return {worker["worker_id"]: worker["state"]["num_running"] for worker in workers}

    def disturbed(self, number: int) -> tuple[float, float]:
        """(detection, pause) in seconds."""
        reached = threading.Event()
        seen: list[float] = []
        client = httpx.Client(base_url=self._serve.url, timeout=TIMEOUT_S, trust_env=False)

        def strike() -> None:
            reached.wait(TIMEOUT_S)
            states = client.get("/cluster").json()["workers"]
            name = next(w["worker_id"] for w in states if w["role"] == "decode" and w["state"]["num_running"])
            pid = self._serve.kill(name, number)
            start_s = time.monotonic()
            while any(w["worker_id"] == name for w in client.get("/cluster").json()["workers"]):
                time.sleep(0.002)
            seen.append(time.monotonic() - start_s)
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=strike)
        thread.start()
        times = self.stream(self.prompt(PROMPT_TOKENS), ANSWER_TOKENS, {KILL_AFTER: reached})
        thread.join(TIMEOUT_S)
        client.close()
        pause_s = max(later - earlier for earlier, later in pairwise(times[1:]))
        wait_until(lambda: len(self.workers()) == 3 and not any(self.workers().values()), TIMEOUT_S, "all to be back")
        return seen[0], pause_s

    def reread(self) -> float:
        """Seconds to the first token when the prompt is cached and the answer so far is not."""
        prompt = self.prompt(PROMPT_TOKENS)
        self.stream(prompt, 2, {})
        times = self.stream(prompt + self.prompt(KILL_AFTER), 2, {})
        return times[1] - times[0]


def main() -> None:
    args = harness.options(__doc__, rounds=10).parse_args()
    if args.quick:
        args.rounds = 1
    print(harness.heading(args))
    pools = ("--prefill", "1", "--decode", "2", "--local-prefill-tokens", "0")
    flags = (*pools, "--kv-memory", "256M", "--max-crashes", "1000")
    with Serve((NAME, *flags, "--beat-interval-s", str(BEAT_INTERVAL_S))) as serve:
        run = Run(serve, random.Random(args.seed))
        reread = [run.reread() for _ in range(args.rounds)]
        killed = [run.disturbed(signal.SIGKILL) for _ in range(args.rounds)]
        stopped = [run.disturbed(signal.SIGSTOP) for _ in range(max(1, args.rounds // 3))]
        serve.send_signal(signal.SIGINT)
        serve.wait(60.0)
    figures = {
        "detection of a death, ms": [1e3 * detection for detection, _ in killed],
        "pause after a death, ms": [1e3 * pause for _, pause in killed],
        "re-read, undisturbed, ms": [1e3 * seconds for seconds in reread],
        "detection of a stopped process, ms": [1e3 * detection for detection, _ in stopped],
    }
    result = {}
    for name, values in figures.items():
        p50, p99 = harness.percentile(values, 50), harness.percentile(values, 99)
        result[name] = {"p50": round(p50, 1), "p99": round(p99, 1)}
        print(f"{name:36} p50 {p50:8.1f}   p99 {p99:8.1f}")
    print(f"a silent worker is lost after two heartbeats of {BEAT_INTERVAL_S:g} s")
    harness.report_json("recovery", args, {"figures": result})


if __name__ == "__main__":
    main()
