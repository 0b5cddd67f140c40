"""Random faults on the real system: are the answers still whole, and the same?

usage: python -m disagg.testing.chaos [--max-seconds S] [--mixes 2+2,1+2@40,...] [--parts serve,links] [--seed N] ...

  part serve   `disagg serve` with the first mix: workers are killed, stopped and slowed
  part links   router and workers behind faulty links, every mix in turn: links are cut, silent, slow, lossy as well

Each run asks undisturbed, then under faults, then undisturbed again (chaos_run). Answers of all runs are compared with
those of the first. Exit code 1 when an answer is lost, differs or is longer, when a block is neither free nor cached at
the end, or when no fault was played at all.
"""

import argparse
import asyncio
import json
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from disagg.cluster.plan import LocalPlan, PoolSizes, plan_local
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.roles import Role
from disagg.modelfiles.fetch import resolve_model
from disagg.policy.restart import RestartPolicy
from disagg.router.config import RouterConfig
from disagg.testing.chaos_cluster import LinkedCluster, ServedCluster
from disagg.testing.chaos_run import ChaosRun, Load, figures, wait_connected
from disagg.testing.chaos_workload import Outcome, Question, draw_questions
from disagg.testing.model_files import VOCAB_SIZE, write_tiny_llama
from disagg.testing.processes import Serve
from disagg.worker.config import WorkerConfig

NAME = "chaos"
BEAT_INTERVAL_S = 1.0
LOCAL_PREFILL_TOKENS = 16
CHUNK_TOKENS = 128
KV_MEMORY_BYTES = 256 << 20
DEATHS = RestartPolicy(max_crashes=1000, max_delay_s=1.0)  # deaths are the point here
MUST_BE_ZERO = ("lost", "differing", "duplicated", "leaked blocks")
_MIX = re.compile(r"(\d+)\+(\d+)(?:\+(\d+))?(?:@(\d+))?")


class Mix(msgspec.Struct, frozen=True):
    """Workers of each role; num_blocks: KV blocks of each, None for more than are ever needed."""

    sizes: PoolSizes
    num_blocks: int | None
    text: str


def parse_mix(text: str) -> Mix:
    """PREFILL+DECODE[+MIXED][@BLOCKS], such as 2+2 or 1+2@40. Raises ConfigurationError."""
    match = _MIX.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"{text!r} is no mix: write PREFILL+DECODE[+MIXED][@BLOCKS], such as 1+2@40")
    prefill, decode, mixed, blocks = (None if part is None else int(part) for part in match.groups())
    return Mix(PoolSizes(prefill or 0, decode or 0, mixed or 0), blocks, text.strip())


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m disagg.testing.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="a model path or smollm2; default: a tiny one made on the spot")
    parser.add_argument("--parts", default="serve,links", help="what is broken: serve, links")
    parser.add_argument("--mixes", default="2+2,1+2@40,1+1+2", help="PREFILL+DECODE[+MIXED][@BLOCKS],...")
    parser.add_argument("--max-seconds", type=float, default=150.0, help="of all fault phases together")
    parser.add_argument("--requests", type=int, default=100_000, help="most requests of one fault phase")
    parser.add_argument("--questions", type=int, default=60, help="distinct requests to draw from")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--fault-every", type=float, default=1.5, help="mean seconds between two faults")
    parser.add_argument("--abort-share", type=float, default=0.1)
    parser.add_argument("--max-prompt", type=int, default=300, help="tokens")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - {"serve", "links"}:
        parser.error(f"--parts {options.parts}: {', '.join(sorted(unknown))} is neither serve nor links")
    return options


def make_plan(model: str, mix: Mix) -> LocalPlan:
    """The same for both parts."""
    router = RouterConfig(
        models=((NAME, model),),
        port=0,
        control_port=0,
        local_prefill_tokens=LOCAL_PREFILL_TOKENS,
        beat_interval_s=BEAT_INTERVAL_S,
    )
    template = WorkerConfig(
        model=model,
        served_name=NAME,
        role=Role.MIXED,
        worker_id="-",
        router_address="",
        num_threads=1,
        kv_memory_bytes=KV_MEMORY_BYTES,
        num_blocks=mix.num_blocks,
        chunk_tokens=CHUNK_TOKENS,
        beat_interval_s=BEAT_INTERVAL_S,
        probe_s=0.0,  # what is damaged on the way is to be a push
    )
    return msgspec.structs.replace(plan_local(router, template, mix.sizes), restart=DEATHS)


def serve_arguments(model: str, mix: Mix) -> tuple[str, ...]:
    """What follows `disagg serve` for the same plan."""
    sizes = mix.sizes
    flags = ["--prefill", sizes.num_prefill, "--decode", sizes.num_decode, "--mixed", sizes.num_mixed]
    flags += ["--served-name", NAME, "--local-prefill-tokens", LOCAL_PREFILL_TOKENS, "--chunk-tokens", CHUNK_TOKENS]
    flags += ["--kv-memory", KV_MEMORY_BYTES, "--num-threads", 1, "--beat-interval-s", BEAT_INTERVAL_S]
    flags += ["--max-crashes", DEATHS.max_crashes, "--max-restart-delay-s", DEATHS.max_delay_s]
    flags += ["--probe-s", 0]
    if mix.num_blocks is not None:
        flags += ["--num-blocks", mix.num_blocks]
    return (model, *(str(flag) for flag in flags))


class Chaos:
    """All runs: what they ask and share."""

    def __init__(self, options: argparse.Namespace, model: str, vocab_size: int) -> None:
        self.mixes = [parse_mix(text) for text in options.mixes.split(",")]
        parts = options.parts.split(",")
        self.runs = [("serve", self.mixes[0])] if "serve" in parts else []
        self.runs += [("links", mix) for mix in self.mixes] if "links" in parts else []
        self._options = options
        self._model = model
        self._reference: dict[int, Outcome] = {}
        self._questions: list[Question] = draw_questions(
            random.Random(options.seed), NAME, options.questions, options.max_prompt, vocab_size
        )

    def play(self, number: int) -> dict[str, object]:
        """One run; its figures."""
        part, mix = self.runs[number]
        plan = make_plan(self._model, mix)
        started_s = time.monotonic()
        if part == "serve":
            run = self._play_serve(number, mix, plan)
        else:
            run = asyncio.run(self._play_links(number, plan))
        seconds = round(time.monotonic() - started_s, 1)
        return {"part": part, "mix": mix.text, "seconds": seconds, **figures(run)}

    def _play_serve(self, number: int, mix: Mix, plan: LocalPlan) -> ChaosRun:
        with Serve(serve_arguments(self._model, mix)) as serve:
            run = self._run(number, ServedCluster(serve), serve.url, plan, [])
            asyncio.run(run.run(lambda: wait_connected(serve.url, len(plan.workers))))
            serve.send_signal(signal.SIGINT)
            if code := serve.wait(60.0):
                raise InternalFault(f"`disagg serve` ended with exit code {code}; its output: {serve.output[-2000:]}")
        return run

    async def _play_links(self, number: int, plan: LocalPlan) -> ChaosRun:
        async with LinkedCluster(plan, seed=self._options.seed + number) as cluster:
            run = self._run(number, cluster, cluster.url, plan, cluster.pairs())
            await run.run(cluster.wait_whole)
            cluster.check_invariants()
            print(f"links: {msgspec.to_builtins(cluster.links.counts())}")
            if "Traceback" in cluster.output:
                raise InternalFault(f"a process wrote a traceback: {cluster.output[-4000:]}")
        return run

    def _run(
        self,
        number: int,
        cluster: ServedCluster | LinkedCluster,
        url: str,
        plan: LocalPlan,
        links: list[tuple[str, str]],
    ) -> ChaosRun:
        options = self._options
        load = Load(
            seed=options.seed + number,
            concurrency=options.concurrency,
            max_requests=options.requests,
            fault_seconds=options.max_seconds / len(self.runs),
            fault_every_s=options.fault_every,
            abort_share=options.abort_share,
        )
        return ChaosRun(
            cluster,
            url,
            load,
            workers=[worker.worker_id for worker in plan.workers],
            links=links,
            questions=self._questions,
            reference=self._reference,
        )


def totals(results: list[dict[str, object]]) -> dict[str, object]:
    """Counts of all runs together."""
    found: dict[str, object] = {}
    for name in ("requests", "left by their client", "preemptions", "wrong checksums", *MUST_BE_ZERO):
        found[name] = sum(value for result in results if isinstance(value := result[name], int))
    for name in ("faults", "moved, by cause", "tokens read again"):
        counts: Counter[str] = Counter()
        for result in results:
            counts.update(msgspec.convert(result[name], dict[str, int]))
        found[name] = dict(sorted(counts.items()))
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started_s = time.monotonic()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(resolve_model(options.model) if options.model else write_tiny_llama(Path(folder) / "tiny"))
        # Ids that a tiny tokenizer may not have stay out.
        chaos = Chaos(options, model, 40_000 if options.model else VOCAB_SIZE - 100)
        print(f"hardware: {platform.processor() or platform.machine()}, seed {options.seed}, model {model}", flush=True)
        for number, (part, mix) in enumerate(chaos.runs):
            print(f"--- {part}, {mix.text}", flush=True)
            results.append(chaos.play(number))
            for name, value in results[-1].items():
                print(f"{name:24} {value}", flush=True)
    together = totals(results)
    print("--- all runs")
    for name, value in together.items():
        print(f"{name:24} {value}")
    seconds = round(time.monotonic() - started_s, 1)
    print(json.dumps({"benchmark": "chaos", "seed": options.seed, **together, "seconds": seconds, "runs": results}))
    return int(not together["faults"] or any(together[name] for name in MUST_BE_ZERO))


if __name__ == "__main__":
    sys.exit(main())
