"""What it gains to begin a first step while KV is still on a slow link, and what other streams notice of it.

    python benchmarks/partial_start.py [--rounds 10] [--rate-mbit 100] [--prompt-tokens 512] [--paced] [--quick]

Two clusters over an emulated link between network namespaces (needs root), --partial-start off and auto, are both up
and asked in turn, in an order that rotates. A prefill and a decode worker have a core each. Differences and ratios are
taken within a round, then their median.

first gap   token 1 -> token 2 of one prompt: what is left of the transfer, and the first step
lone        nothing else runs on the decode worker
beside      4 other answers are being written there; their gaps from the prompt's arrival to its token 2 are ITL
step        median gap of the lone answer after token 2: more than that cannot be gained
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

import harness
import paced
from disagg.core.roles import PartialStart
from disagg.modelfiles.fetch import resolve_model, served_name
from disagg.telemetry.metrics import PARTIAL_STARTS
from disagg.testing.links.cluster import SpreadCluster
from disagg.testing.links.namespaces import LinkedNamespaces, missing
from disagg.testing.links.shape import LinkShape
from handoff_cost import Times, ask
from harness import Prompts, percentile, wait_idle
from token_stream import TokenStream, Writer

OFF, AUTO = PartialStart.OFF.value, PartialStart.AUTO.value
SIDES = (OFF, AUTO)
ANSWER_TOKENS = 8
NUM_OTHERS = 4
OTHER_PROMPT, OTHER_ANSWER = 64, 600  # tokens; an answer outlasts the prompt that is handed over beside it
OTHERS_AHEAD = 8  # tokens that each of them has before the prompt is sent
TIMEOUT_S = 120.0
NUM_WARM = 2  # prompts: the rate of the link is known then, and no page of the KV memory is new
MAX_ITL_RATIO = 1.05


class Beside(msgspec.Struct, frozen=True):
    """One prompt beside others, in ms."""

    first_gap_ms: float
    itl_ms: tuple[float, ...]  # of the others


class Found(msgspec.Struct):
    """One side's rounds."""

    lone: list[Times]
    beside: list[Beside]


@contextlib.contextmanager
def clusters(args: argparse.Namespace) -> Iterator[dict[str, SpreadCluster]]:
    """Both sides, up, over one link that one of them uses at a time; this thread is at its first end."""
    cores = sorted(os.sched_getaffinity(0))
    places = (str(cores[0]), str(cores[1 % len(cores)]))
    path, name = resolve_model(args.model), served_name(args.model)
    program, flags = args.device.program, args.device.flags
    flags = ("--kv-memory", "256M", *flags)
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(LinkedNamespaces(LinkShape(args.rate_mbit)))
        stack.enter_context(pair.entered(0))
        yield {
            side: stack.enter_context(
                SpreadCluster(pair, path, name, (*flags, "--partial-start", side), cores=places, program=program)
            )
            for side in SIDES
        }


async def ask_beside(url: str, prompts: Prompts, rng: random.Random, num_tokens: int) -> Beside:
    """One prompt while others write; all of them are told to stop then."""
    others = [Writer(url, prompts.body(rng, OTHER_PROMPT, OTHER_ANSWER), TIMEOUT_S) for _ in range(NUM_OTHERS)]
    try:
        await asyncio.gather(*(each.start(OTHERS_AHEAD) for each in others))
        stream = await TokenStream.open(url, prompts.body(rng, num_tokens, ANSWER_TOKENS))
        try:
            await stream.reached(ANSWER_TOKENS, TIMEOUT_S)
        finally:
            stream.abort()
        if any(each.streams[0].is_over.done() for each in others):
            raise SystemExit(f"the others were over after {OTHER_ANSWER} tokens: give them longer answers")
        first_s, second_s = stream.token_s[:2]
        gaps = [1e3 * (end_s - begin_s) for each in others for begin_s, end_s in each.gaps(stream.sent_s, second_s)]
    finally:
        for each in others:
            each.stop()
    return Beside(1e3 * (second_s - first_s), tuple(gaps))


async def measure(
    servers: Mapping[str, SpreadCluster], prompts: Prompts, rng: random.Random, args: argparse.Namespace
) -> dict[str, Found]:
    """Raises SystemExit when the sides answer differently."""
    found = {side: Found([], []) for side in servers}
    for _ in range(NUM_WARM):
        body = prompts.body(rng, args.prompt_tokens, ANSWER_TOKENS)
        for server in servers.values():
            await ask(server, body)
    for turn in range(args.rounds):
        order = [SIDES[(place + turn) % len(SIDES)] for place in range(len(SIDES))]
        body, seed, texts = prompts.body(rng, args.prompt_tokens, ANSWER_TOKENS), rng.random(), set()
        for side in order:
            times, text = await ask(servers[side], body)
            found[side].lone.append(times)
            texts.add(text)
        if len(texts) != 1:
            raise SystemExit(f"the sides answered differently: {sorted(texts)}")
        for side in order:
            beside = await ask_beside(servers[side].url, prompts, random.Random(seed), args.prompt_tokens)
            found[side].beside.append(beside)
            await wait_idle(servers[side])
        shown = "  ".join(
            f"{side} {each.lone[-1].first_gap_ms:.0f}/{each.beside[-1].first_gap_ms:.0f}"
            for side, each in found.items()
        )
        print(f"  round {turn + 1}, first gap lone/beside, ms: {shown}", flush=True)
    return found


def outcomes(server: SpreadCluster) -> dict[str, int]:
    """What became of the chances to begin early."""
    counted = harness.scrape(server).items()
    return {label: int(total) for (name, _, label), total in counted if name == PARTIAL_STARTS.name and label}


class Figures(msgspec.Struct, frozen=True):
    """Medians over rounds, in ms; gains are those of `auto` over `off`."""

    step_ms: float
    first_gap_ms: dict[str, dict[str, float]]  # by side, then lone or beside
    gain_ms: dict[str, float]
    itl_p50_ms: dict[str, float]
    itl_p99_ms: dict[str, float]
    num_gaps: dict[str, int]


def figures(found: Mapping[str, Found]) -> Figures:
    def gaps(side: str) -> dict[str, list[float]]:
        each = found[side]
        return {"lone": [t.first_gap_ms for t in each.lone], "beside": [b.first_gap_ms for b in each.beside]}

    off, auto = gaps(OFF), gaps(AUTO)
    itl = {side: [gap for beside in each.beside for gap in beside.itl_ms] for side, each in found.items()}
    return Figures(
        step_ms=statistics.median(times.itl_ms for each in found.values() for times in each.lone),
        first_gap_ms={side: {kind: statistics.median(values) for kind, values in gaps(side).items()} for side in found},
        gain_ms={kind: statistics.median(_minus(off[kind], auto[kind])) for kind in off},
        itl_p50_ms={side: percentile(values, 50) for side, values in itl.items()},
        itl_p99_ms={side: percentile(values, 99) for side, values in itl.items()},
        num_gaps={side: len(values) for side, values in itl.items()},
    )


def _minus(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def show(row: Figures, counted: Mapping[str, Mapping[str, int]], foreign: float) -> None:
    print(f"\na lone step takes {row.step_ms:.1f} ms; medians, ms")
    for side in SIDES:
        gap = row.first_gap_ms[side]
        print(
            f"  {side:5} first gap {gap['lone']:8.1f} lone {gap['beside']:8.1f} beside   ITL of {NUM_OTHERS} others "
            f"p50 {row.itl_p50_ms[side]:6.1f} p99 {row.itl_p99_ms[side]:6.1f} ({row.num_gaps[side]} gaps)   "
            f"outcomes {dict(counted[side])}"
        )
    for kind, gain in row.gain_ms.items():
        print(f"  gained, {kind}: {gain:.1f} ms = {gain / row.step_ms:.2f} of a step")
    for name, values in (("p50", row.itl_p50_ms), ("p99", row.itl_p99_ms)):
        print(
            harness.verdict(f"  {name} ITL of others, auto / off", values[AUTO] / values[OFF], MAX_ITL_RATIO, foreign)
        )
    harness.warn_of_others(foreign)


def main() -> None:
    parser = harness.options(__doc__, rounds=10)
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of the emulated link")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    paced.add_option(parser)
    args = parser.parse_args()
    args.device = paced.device(args)
    if args.quick:
        args.rounds, args.prompt_tokens = 1, 256
    print(harness.heading(args), "interleaved")
    if reason := missing(LinkShape(args.rate_mbit)):
        raise SystemExit(f"no emulated link here: {reason}")
    print(f"prompts of {args.prompt_tokens} tokens over {LinkShape(args.rate_mbit).name}, greedy, no prefix reuse")
    prompts = Prompts(args.model)
    with paced.watched(args), clusters(args) as servers:
        use = harness.cpu_use()
        found = asyncio.run(measure(servers, prompts, random.Random(args.seed), args))
        foreign = paced.foreign_share(args, use, harness.cpu_use())
        counted = {side: outcomes(server) for side, server in servers.items()}
    row = figures(found)
    show(row, counted, foreign)
    more = {"rate_mbit": args.rate_mbit, "prompt_tokens": args.prompt_tokens, "foreign_share": foreign}
    report_figures = {**more, **msgspec.structs.asdict(row), "outcomes": counted}
    harness.report_json("partial_start", args, report_figures)


if __name__ == "__main__":
    main()
