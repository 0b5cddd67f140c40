"""The served system beside llama.cpp's server: four streaming clients over HTTP, on the same two cores.

    python benchmarks/engine_http.py [--quick] [--rounds 2] [--requests 3] [--serve-flags "..."] [--paced]

  split      disagg serve, 1 prefill + 1 decode worker, a core and a thread each; every prompt is handed off
  steady     the same with --first-token steady: token 1 is told when the step for token 2 begins
  mixed      disagg serve, 1 mixed worker on both cores
  llama.cpp  its server with a slot per client, 16-bit and 8-bit weights, on both cores

Each client asks again as soon as its answer is over, `requests` times a round; all servers stay up, one is asked at a
time, in an order that rotates. No two prompts share a beginning. The clients share the cores with whoever runs.
--paced: ours alone, on a device whose speed holds still (paced.py): what gaps are left are of the system's own making.

TTFT  request sent -> token 1
gap   time between two tokens of one answer, where all its tokens have text; first: from token 1 to token 2
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import paced
from disagg.cluster.local import PROGRAM
from disagg.modelfiles.fetch import resolve_model
from harness import (
    Prompts,
    cpu_use,
    heading,
    options,
    percentile,
    report_json,
    serving,
    warn_of_others,
)
from peers.catalog import Command, Entry, Precision, command_of
from peers.environments import LLAMACPP_PREBUILT, Unavailable
from peers.fleet import RunningEngine
from token_stream import TokenStream

NUM_CLIENTS = 4
NUM_THREADS = 2
PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 512, 128
ANSWER_TOKENS, QUICK_ANSWER_TOKENS = 64, 16
ANSWER_TIMEOUT_S = 300.0
KV_MEMORY = "256M"
SPLIT = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--kv-memory", KV_MEMORY)
SIDES = {
    "split": SPLIT,
    "steady": (*SPLIT, "--first-token", "steady"),
    "mixed": ("--mixed", "1", "--num-threads", str(NUM_THREADS), "--kv-memory", KV_MEMORY),
}
LLAMACPP = tuple(
    Entry("llama.cpp", form, precision, "serve_llamacpp.py", form, (LLAMACPP_PREBUILT,), form)
    for form, precision in (("F16", Precision.FP16), ("Q8_0", Precision.INT8))
)


class Seen(msgspec.Struct):
    """What the clients of one server saw; one entry per round, request or gap."""

    requests_per_s: list[float] = []
    ttft_ms: list[float] = []
    gaps_ms: list[float] = []
    first_gaps_ms: list[float] = []  # of those
    num_without_gaps: int = 0  # answers with a token without text of its own: a gap there would hold two


@contextlib.contextmanager
def llamacpp_servers(model: Path) -> Iterator[dict[str, str]]:
    """URL by name of each that can be had; the others are named with the reason."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for entry in LLAMACPP:
            try:
                command: Command = command_of(entry, model)
                engine = RunningEngine(command, NUM_THREADS)
            except Unavailable as error:
                print(f"  {entry.name}: SKIPPED, {error}", flush=True)
                continue
            stack.callback(engine.close)
            urls[entry.name] = engine.hello.note
            print(f"  {entry.name}: {engine.hello.version.strip()}", flush=True)
        yield urls


async def client(url: str, bodies: list[dict[str, object]]) -> list[TokenStream]:
    """One after the other. Raises ConnectionError, TimeoutError."""
    streams: list[TokenStream] = []
    for body in bodies:
        stream = await TokenStream.open(url, body)
        await stream.finish(ANSWER_TIMEOUT_S)
        streams.append(stream)
    return streams


class Load:
    """Where the bodies of requests come from; no two are alike."""

    def __init__(self, model: str, seed: int, is_quick: bool) -> None:
        self._prompts = Prompts(model)
        self._random = random.Random(seed)
        self.prompt_tokens = QUICK_PROMPT_TOKENS if is_quick else PROMPT_TOKENS
        self.answer_tokens = QUICK_ANSWER_TOKENS if is_quick else ANSWER_TOKENS

    def bodies(self, number: int) -> list[dict[str, object]]:
        return [self._prompts.body(self._random, self.prompt_tokens, self.answer_tokens) for _ in range(number)]


async def ask(url: str, load: Load, num_requests: int, seen: Seen) -> None:
    """All clients at once, num_requests each. Raises SystemExit for an answer of another length."""
    bodies = [load.bodies(num_requests) for _ in range(NUM_CLIENTS)]
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(client(url, each) for each in bodies))
    seconds = time.perf_counter() - start_s
    streams = [stream for answer in answers for stream in answer]
    seen.requests_per_s.append(len(streams) / seconds)
    for stream in streams:
        if stream.usage.completion_tokens != load.answer_tokens:
            raise SystemExit(f"{url}: an answer of {stream.usage.completion_tokens} tokens, not {load.answer_tokens}")
        seen.ttft_ms.append(1e3 * (stream.token_s[0] - stream.sent_s))
        if len(stream.token_s) == load.answer_tokens:
            gaps_ms = [1e3 * (after - before) for before, after in itertools.pairwise(stream.token_s)]
            seen.gaps_ms += gaps_ms
            seen.first_gaps_ms += gaps_ms[:1]
        else:
            seen.num_without_gaps += 1


def measure(urls: dict[str, str], load: Load, args: argparse.Namespace) -> dict[str, Seen]:
    """One request per client that is not counted, then the rounds."""
    found = {name: Seen() for name in urls}
    for name, url in urls.items():
        asyncio.run(ask(url, load, 1, Seen()))
        print(f"  {name}: warm", flush=True)
    for number in range(args.rounds):
        names = list(urls)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            asyncio.run(ask(urls[name], load, args.requests, found[name]))
            print(f"  round {number + 1}: {name} {found[name].requests_per_s[-1]:.2f} requests/s", flush=True)
    return found


def show(found: dict[str, Seen]) -> dict[str, object]:
    """Print; the figures for the JSON line."""
    figures: dict[str, object] = {}
    heads = ("requests/s", "TTFT p50 ms", "TTFT max", "gap p50 ms", "gap p99", "worst gap", "worst / p50", "first p50")
    print("\n" + " " * 16 + "".join(f"{head:>13}" for head in heads))
    for name, seen in found.items():
        gap = percentile(seen.gaps_ms, 50)
        values = {
            "requests_per_s": statistics.median(seen.requests_per_s),
            "ttft_p50_ms": percentile(seen.ttft_ms, 50),
            "ttft_max_ms": max(seen.ttft_ms),
            "gap_p50_ms": gap,
            "gap_p99_ms": percentile(seen.gaps_ms, 99),
            "gap_max_ms": max(seen.gaps_ms),
            "gap_max_to_p50": max(seen.gaps_ms) / gap,
            "first_gap_p50_ms": percentile(seen.first_gaps_ms, 50),
        }
        shown = "".join(f"{value:13.2f}" if value < 10 else f"{value:13.1f}" for value in values.values())
        print(f"{name:16}{shown}")
        if seen.num_without_gaps:
            print(f"{'':16}gaps of {seen.num_without_gaps} answers are left out: a token there had no text of its own")
        figures[name] = values
    rates = {name: statistics.median(seen.requests_per_s) for name, seen in found.items()}
    for ours, theirs in itertools.product(SIDES, (name for name in rates if name not in SIDES)):
        print(f"{ours} / {theirs}, requests/s: {rates[ours] / rates[theirs]:.2f}")
    return figures


def main() -> None:
    parser = options(__doc__, rounds=2)
    parser.add_argument("--requests", type=int, default=3, help="of each client and round")
    parser.add_argument("--serve-flags", default="", help="more flags for disagg serve, in one string")
    paced.add_option(parser)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests = 1, 1
    flags = tuple(shlex.split(args.serve_flags))
    load = Load(args.model, args.seed, args.quick)
    print(heading(args), "interleaved")
    tokens = f"{load.prompt_tokens} tokens in, {load.answer_tokens} out"
    print(f"{NUM_CLIENTS} clients, {tokens}; more flags: {args.serve_flags!r}")
    with paced.watched(args), contextlib.ExitStack() as stack:
        program, own = (paced.PACED.program, paced.PACED.flags) if args.paced else (PROGRAM, ())
        servers = {
            name: stack.enter_context(serving(args.model, *pools, *own, *flags, program=program))
            for name, pools in SIDES.items()
        }
        urls = {name: server.url for name, server in servers.items()}
        if not args.paced:
            urls |= stack.enter_context(llamacpp_servers(resolve_model(args.model, report=print)))
        use = cpu_use()
        found = measure(urls, load, args)
        foreign = paced.foreign_share(args, use, cpu_use())
        figures = show(found)
    warn_of_others(foreign)
    report_json("engine_http", args, {"flags": flags, "foreign_share": foreign, "sides": figures})


if __name__ == "__main__":
    main()
