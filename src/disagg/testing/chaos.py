"""Random faults on the real system: are the answers still whole, and the same?

usage: python -m disagg.testing.chaos [--model PATH|smollm2] [--requests N] [--fault-every S] [--seed N] ...

  standard   every question once, undisturbed: the reference, and latencies to compare with
  fault      requests drawn from the questions while processes are killed, stopped and resumed
  recovery   undisturbed again: latencies are back, nothing is left behind

Exit code 1 when an answer differs, is lost, or a block is not free or cached at the end.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from disagg.core.errors import InternalFault
from disagg.testing.chaos_workload import Outcome, Question, ask, draw_questions, is_same
from disagg.testing.model_files import VOCAB_SIZE, write_tiny_llama
from disagg.testing.processes import Serve

RETURN_TIMEOUT_S = 120.0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m disagg.testing.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="a model path or smollm2; default: a tiny one made on the spot")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--questions", type=int, default=60, help="distinct requests to draw from")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--fault-every", type=float, default=4.0, help="mean seconds between two faults")
    parser.add_argument("--abort-share", type=float, default=0.1)
    parser.add_argument("--max-prompt", type=int, default=300, help="tokens")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="of the fault phase")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


class Chaos:
    """One run against one `disagg serve`."""

    def __init__(self, options: argparse.Namespace, serve: Serve, questions: list[Question]) -> None:
        self._options = options
        self._serve = serve
        self._questions = questions
        self._random = random.Random(options.seed)
        self.faults: Counter[str] = Counter()
        self.outcomes: dict[str, list[tuple[Question, Outcome]]] = {"standard": [], "fault": [], "recovery": []}
        self.reference: dict[int, Outcome] = {}

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self._options.concurrency * 2)
        async with httpx.AsyncClient(base_url=self._serve.url, timeout=None, limits=limits, trust_env=False) as client:
            for index, question in enumerate(self._questions):
                outcome = await ask(client, question)
                if outcome.error is not None:
                    raise InternalFault(f"undisturbed, and yet: {outcome.error}")
                self.reference[index] = outcome
            await self._phase(client, "standard", len(self._questions), with_aborts=False)
            faults = asyncio.create_task(self._keep_breaking())
            try:
                await self._phase(client, "fault", self._options.requests, with_aborts=True)
            finally:
                faults.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await faults
            await self._wait_whole(client)
            await self._phase(client, "recovery", len(self._questions), with_aborts=False)

    async def _phase(self, client: httpx.AsyncClient, name: str, num_requests: int, *, with_aborts: bool) -> None:
        """A closed loop of `concurrency` clients."""
        todo = iter([self._random.randrange(len(self._questions)) for _ in range(num_requests)])
        end_s = time.monotonic() + self._options.max_seconds

        async def work() -> None:
            for index in todo:
                if time.monotonic() > end_s:
                    return
                leaves = with_aborts and self._random.random() < self._options.abort_share
                outcome = await ask(client, self._questions[index], self._random.uniform(0, 0.5) if leaves else None)
                self.outcomes[name].append((self._questions[index], outcome))
                self._check(index, outcome)

        await asyncio.gather(*(work() for _ in range(self._options.concurrency)))

    def _check(self, index: int, outcome: Outcome) -> None:
        if outcome.error is not None:
            print(f"lost: {self._questions[index].kind}: {outcome.error}", flush=True)
        elif not outcome.is_aborted and not is_same(outcome, self.reference[index]):
            print(f"differs: {self._questions[index].body}\n  {outcome}\n  {self.reference[index]}", flush=True)

    async def _keep_breaking(self) -> None:
        names = [f"prefill-{n}" for n in range(self._options.prefill)]
        names += [f"decode-{n}" for n in range(self._options.decode)]
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._options.fault_every))
            name = self._random.choice(names)
            kind = self._random.choice(["kill", "kill", "short stop", "long stop"])
            with contextlib.suppress(InternalFault, ProcessLookupError):  # it is down already
                if kind == "kill":
                    self._serve.kill(name)
                else:
                    self._serve.kill(name, signal.SIGSTOP)
                    await asyncio.sleep(self._random.uniform(0.1, 0.8) if kind == "short stop" else 4.0)
                    self._serve.kill(name, signal.SIGCONT)
                self.faults[f"{kind} {name.split('-')[0]}"] += 1

    async def _wait_whole(self, client: httpx.AsyncClient) -> None:
        end_s = time.monotonic() + RETURN_TIMEOUT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                workers = (await client.get("/cluster")).json()["workers"]
                if len(workers) == self._options.prefill + self._options.decode:
                    return
            await asyncio.sleep(0.3)
        raise InternalFault(f"not all workers were back within {RETURN_TIMEOUT_S:g} s")

    def leaked_blocks(self) -> int:
        """Blocks that are neither free nor cached once nothing runs."""
        end_s = time.monotonic() + 40.0
        while True:
            workers = httpx.get(f"{self._serve.url}/cluster", trust_env=False).json()["workers"]
            states = ("num_held_blocks", "num_reserved_blocks", "num_quarantined_blocks")
            left = sum(worker["state"][state] for worker in workers for state in states)
            if left == 0 or time.monotonic() > end_s:
                return int(left)
            time.sleep(0.2)

    def moves(self) -> dict[str, float]:
        lines = httpx.get(f"{self._serve.url}/metrics", trust_env=False).text.splitlines()
        found = (line.partition('disagg_moves_total{cause="')[2] for line in lines)
        return {line.split('"')[0]: float(line.split()[-1]) for line in found if line}


def report(chaos: Chaos) -> dict[str, object]:
    """Print the figures; returns them."""
    all_outcomes = [item for phase in ("fault", "recovery") for item in chaos.outcomes[phase]]
    index = {id(question): number for number, question in enumerate(chaos._questions)}
    answered = [(q, o) for q, o in all_outcomes if not o.is_aborted]
    result: dict[str, object] = {
        "requests": len(all_outcomes),
        "aborted by the client": len(all_outcomes) - len(answered),
        "lost": sum(o.error is not None for _, o in answered),
        "differing": sum(o.error is None and not is_same(o, chaos.reference[index[id(q)]]) for q, o in answered),
        "leaked blocks": chaos.leaked_blocks(),
        "faults": dict(chaos.faults),
        "moved, by cause": chaos.moves(),
    }
    for phase, outcomes in chaos.outcomes.items():
        streamed = [o for q, o in outcomes if q.is_streamed and o.error is None and not o.is_aborted]
        firsts = sorted(o.ttft_s for o in streamed if o.ttft_s is not None)
        gaps = sorted(gap for o in streamed for gap in o.gaps_s)
        result[phase] = {
            "requests": len(outcomes),
            "ttft_ms": [_ms(firsts, 0.5), _ms(firsts, 0.99)],
            "itl_ms": [_ms(gaps, 0.5), _ms(gaps, 0.99), _ms(gaps, 1.0)],
        }
    for name, value in result.items():
        print(f"{name:24} {value}")
    return result


def _ms(values: list[float], share: float) -> float:
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 1) if values else 0.0


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_tiny_llama(Path(folder) / "tiny"))
        name = "chaos"
        vocab = VOCAB_SIZE - 100 if not options.model else 40_000  # ids that a tiny tokenizer may not have stay out
        questions = draw_questions(random.Random(options.seed), name, options.questions, options.max_prompt, vocab)
        flags = ["--prefill", str(options.prefill), "--decode", str(options.decode), "--served-name", name]
        flags += ["--local-prefill-tokens", "16", "--kv-memory", "256M", "--num-threads", "1"]
        flags += ["--beat-interval-s", "0.5", "--beat-timeout-s", "2.5", "--chunk-tokens", "128"]
        flags += ["--max-crashes", "1000", "--max-restart-delay-s", "1"]  # deaths are the point here
        started_s = time.monotonic()
        with Serve((model, *flags)) as serve:
            chaos = Chaos(options, serve, questions)
            asyncio.run(chaos.run())
            print(f"hardware: {platform.processor() or platform.machine()}, seed {options.seed}, model {model}")
            result = report(chaos)
            serve.send_signal(signal.SIGINT)
            serve.wait(60.0)
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps({"benchmark": "chaos", "seed": options.seed, **result}))
    return int(any(result[key] for key in ("lost", "differing", "leaked blocks")))


if __name__ == "__main__":
    sys.exit(main())
