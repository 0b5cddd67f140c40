"""How much reading long prompts disturbs streams that are being written: mixed workers against separate ones.

    python benchmarks/interference.py [--rounds 3] [--seconds 40] [--quick]

Four streams write long answers in a closed loop while 1,500-token prompts arrive in an open loop. Phases, interleaved:

  a  2 mixed workers                                   the router spreads the streams: two on each worker
  b  1 prefill + 1 decode worker                       all four streams on the decode worker
  c  as b, no arrivals, but a stranger multiplies matrices of the model's sizes on the prefill worker's core all the
     time: the cores share memory bandwidth, so this is what a perfect separation could reach
  d  as b, no arrivals, no stranger
  e  as b, but a quarter of the arrivals are short (64 to 256 tokens): the decode worker reads these itself

ITL is every gap between two tokens of a stream inside the window; TTFT is request sent -> first token. The arrival
times of a round are the same in a, b and e: a Poisson process, given how many arrive (so a short run has some).
Each worker has cores of its own; the router and this client have none and take turns with whoever runs.
"""

import argparse
import asyncio
import contextlib
import random

import msgspec

import harness
from disagg.telemetry.metrics import GENERATED_TOKENS
from disagg.testing.processes import Serve
from harness import Prompts, percentile
from stranger import stranger
from token_stream import TokenStream, Writer

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 128
STREAM_ANSWER_TOKENS = 2000
WARM_TOKENS = 8  # of each stream, before the window opens
LONG_TOKENS = 1500
SHORT_TOKENS = (64, 256)
SHORT_SHARE = 0.25
ARRIVAL_ANSWER_TOKENS = 1  # what is measured of an arrival is its first token; more would be a fifth stream
MEAN_ARRIVAL_S = 9.0  # one worker reads a long prompt in about half of this
ANSWER_TIMEOUT_S = 240.0
MAX_P99_RATIO = 1.05


class Phase(msgspec.Struct, frozen=True):
    """What goes on beside the four streams."""

    key: str
    name: str
    is_mixed: bool = False
    has_arrivals: bool = False
    short_share: float = 0.0
    has_stranger: bool = False


PHASES = (
    Phase("a", "2 mixed, arrivals", is_mixed=True, has_arrivals=True),
    Phase("b", "1 prefill + 1 decode, arrivals", has_arrivals=True),
    Phase("c", "1 prefill + 1 decode, stranger", has_stranger=True),
    Phase(
        "d",
        "1 prefill + 1 decode, alone",
    ),
    Phase("e", "as b, a quarter short", has_arrivals=True, short_share=SHORT_SHARE),
)


class Seen(msgspec.Struct):
    """What one phase showed so far, in ms."""

    itl_ms: list[float] = []
    itl_ms_by_round: list[list[float]] = []
    itl_reading_ms: list[float] = []  # gaps beside a prompt that is being read, without a fifth stream
    itl_fifth_ms: list[float] = []  # gaps beside an arrival that is writing its own few tokens
    long_ttft_ms: list[float] = []
    short_ttft_ms: list[float] = []
    num_unseen_tokens: int = 0  # counted by the router, without text of their own
    foreign_share: float = 0.0  # of the cores, in the worst window


class Arrival(msgspec.Struct, frozen=True):
    at_s: float  # after the window's begin
    body: dict[str, object]
    is_long: bool


# ---- load


def arrivals_of(phase: Phase, prompts: Prompts, seed: str, seconds: float) -> list[Arrival]:
    """The same times in every phase of a round; prompts that no other phase or round has."""
    if not phase.has_arrivals:
        return []
    clock = random.Random(seed)
    number = max(1, round(seconds / MEAN_ARRIVAL_S))
    times = sorted(clock.uniform(0.0, seconds) for _ in range(number))
    num_short = max(1, round(number * phase.short_share)) if phase.short_share else 0
    places = set(clock.sample(range(number), num_short))
    rng = random.Random(f"{seed}/{phase.key}")
    found = []
    for place, at_s in enumerate(times):
        num_tokens = rng.randint(*SHORT_TOKENS) if place in places else LONG_TOKENS
        found.append(Arrival(at_s, prompts.body(rng, num_tokens, ARRIVAL_ANSWER_TOKENS), place not in places))
    return found


async def arrive(server: Serve, arrival: Arrival, start_s: float) -> TokenStream:
    await harness.until(start_s + arrival.at_s)
    stream = await TokenStream.open(server.url, arrival.body)
    await stream.finish(ANSWER_TIMEOUT_S)
    if stream.usage.prompt_tokens_details["cached_tokens"]:
        raise SystemExit(f"an arrival found a part of its prompt cached: {stream.usage}")
    return stream


async def run_phase(server: Serve, bodies: list[dict[str, object]], plan: list[Arrival], seconds: float) -> Seen:
    """Start the streams, open the window when all write, end everything that was started."""
    num_before = await asyncio.to_thread(generated, server)
    writers = [Writer(server.url, body, ANSWER_TIMEOUT_S) for body in bodies]
    try:
        await asyncio.gather(*(writer.start(WARM_TOKENS) for writer in writers))
        use = harness.cpu_use()
        start_s, stop_s = use.at_s, use.at_s + seconds
        arrived = await _beside(writers, plan, server, start_s, stop_s)
        foreign = harness.foreign_share(use, harness.cpu_use())
    finally:
        for writer in writers:
            writer.stop()
    await harness.wait_idle(server)
    num_generated = await asyncio.to_thread(generated, server) - num_before
    seen = _seen(writers, list(zip(plan, arrived, strict=True)), start_s, stop_s)
    seen.foreign_share = foreign
    seen.num_unseen_tokens += num_generated
    return seen


async def _beside(
    writers: list[Writer], plan: list[Arrival], server: Serve, start_s: float, stop_s: float
) -> list[TokenStream]:
    """Until the window closes and every arrival has its answer: late ones see the same streams."""
    writing = asyncio.gather(*(writer.go_on() for writer in writers))
    coming = asyncio.gather(*(arrive(server, arrival, start_s) for arrival in plan), harness.until(stop_s))
    try:
        await asyncio.wait((writing, coming), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()  # only an error ends it
        return [stream for stream in await coming if stream is not None]
    finally:
        writing.cancel()
        coming.cancel()
        await asyncio.gather(writing, coming, return_exceptions=True)


def generated(server: Serve) -> int:
    """Tokens the router has delivered so far."""
    return int(harness.scrape(server).get((GENERATED_TOKENS.name, "", ""), 0))


def _seen(
    writers: list[Writer],
    arrived: list[tuple[Arrival, TokenStream]],
    start_s: float,
    stop_s: float,
) -> Seen:
    seen = Seen()
    reading = [(stream.sent_s, stream.token_s[0]) for arrival, stream in arrived if arrival.is_long]
    writing = [(stream.token_s[0], stream.token_s[-1]) for _, stream in arrived]
    for begin_s, end_s in (gap for writer in writers for gap in writer.gaps(start_s, stop_s)):
        seen.itl_ms.append(1e3 * (end_s - begin_s))
        if _touches(begin_s, end_s, writing):
            seen.itl_fifth_ms.append(1e3 * (end_s - begin_s))
        elif _touches(begin_s, end_s, reading):
            seen.itl_reading_ms.append(1e3 * (end_s - begin_s))
    for arrival, stream in arrived:
        ttfts = seen.long_ttft_ms if arrival.is_long else seen.short_ttft_ms
        ttfts.append(1e3 * (stream.token_s[0] - stream.sent_s))
    streams = [*(stream for writer in writers for stream in writer.streams), *(stream for _, stream in arrived)]
    seen.num_unseen_tokens = -sum(len(stream.token_s) for stream in streams)
    return seen


def _touches(begin_s: float, end_s: float, times: list[tuple[float, float]]) -> bool:
    return any(begin_s < until_s and end_s > from_s for from_s, until_s in times)


# ---- all of it


def measure(args: argparse.Namespace, prompts: Prompts, mixed: Serve, split: Serve) -> dict[str, Seen]:
    seen = {phase.key: Seen() for phase in PHASES}
    rng = random.Random(args.seed)
    bodies = [prompts.body(rng, STREAM_PROMPT_TOKENS, STREAM_ANSWER_TOKENS) for _ in range(NUM_STREAMS)]
    for server in (mixed, split):  # touches memory and caches that a first request would pay for
        warm = [Arrival(0.0, prompts.body(rng, LONG_TOKENS, ARRIVAL_ANSWER_TOKENS), True) for _ in range(2)]
        asyncio.run(run_phase(server, bodies, warm, 1.0))
    for number in range(args.rounds):
        for phase in PHASES:
            server = mixed if phase.is_mixed else split
            plan = arrivals_of(phase, prompts, f"{args.seed}/{number}", args.seconds)
            with contextlib.ExitStack() as beside:
                if phase.has_stranger:
                    cores, num_threads = harness.cores_of(split, "prefill-0"), harness.threads_of(split, "prefill-0")
                    beside.enter_context(stranger(args.model, cores, num_threads))
                found = asyncio.run(run_phase(server, bodies, plan, args.seconds))
            _add(seen[phase.key], found)
            p50, p99 = (percentile(found.itl_ms, percent) for percent in (50, 99))
            others = f"others {100 * found.foreign_share:.0f} %"
            print(f"  round {number + 1} {phase.key}: ITL p50 {p50:.1f}, p99 {p99:.1f} ms, {others}", flush=True)
    return seen


def _add(total: Seen, found: Seen) -> None:
    total.itl_ms += found.itl_ms
    total.itl_ms_by_round.append(found.itl_ms)
    total.itl_reading_ms += found.itl_reading_ms
    total.itl_fifth_ms += found.itl_fifth_ms
    total.long_ttft_ms += found.long_ttft_ms
    total.short_ttft_ms += found.short_ttft_ms
    total.num_unseen_tokens += found.num_unseen_tokens
    total.foreign_share = max(total.foreign_share, found.foreign_share)


def show(seen: dict[str, Seen]) -> dict[str, object]:
    """Print; the figures for the JSON line."""
    print(f"\n{'':34}{'ITL of the streams, ms':^54}{'TTFT of arrivals, ms':>30}")
    print(
        f"{'':34}{'gaps':>6}{'p50':>8}{'p99':>8}{'most':>8}{'p99 (R)':>12}{'p99 (W)':>12}"
        f"{'long p50':>12}{'most':>8}{'short p50':>12}"
    )
    for phase in PHASES:
        each = seen[phase.key]
        p50, p99, most = (percentile(each.itl_ms, percent) for percent in (50, 99, 100))
        reading, fifth = percentile(each.itl_reading_ms, 99), percentile(each.itl_fifth_ms, 99)
        long, long_most = percentile(each.long_ttft_ms, 50), percentile(each.long_ttft_ms, 100)
        short = percentile(each.short_ttft_ms, 50)
        print(
            f"{phase.key}  {phase.name:31}{len(each.itl_ms):6}{p50:8.1f}{p99:8.1f}{most:8.1f}{reading:12.1f}"
            f"{fifth:12.1f}{long:12.0f}{long_most:8.0f}{short:12.0f}"
        )
        if each.num_unseen_tokens > NUM_STREAMS * len(each.itl_ms_by_round):
            print(f"   {each.num_unseen_tokens} tokens had no event of their own: some gaps are sums of two")
    print("(R) gaps beside a long prompt that is being read, and no fifth stream")
    print("(W) gaps beside an arrival that writes its own tokens: a fifth stream, which (c) does not have\n")
    foreign = max(each.foreign_share for each in seen.values())
    tails = {key: percentile(each.itl_ms, 99) for key, each in seen.items()}
    ratios = {
        "b/c": tails["b"] / tails["c"],
        "b reading/c": percentile(seen["b"].itl_reading_ms, 99) / tails["c"],
        "a/b": tails["a"] / tails["b"],
        "e/b": tails["e"] / tails["b"],
        "c/d": tails["c"] / tails["d"],
    }
    print(harness.verdict("p99 ITL, separate (b) / perfect separation (c)", ratios["b/c"], MAX_P99_RATIO, foreign))
    print(f"p99 ITL, separate while reading only (b, R) / perfect separation (c): {ratios['b reading/c']:.3f}")
    print(f"p99 ITL, mixed (a) / separate (b): {ratios['a/b']:.2f}")
    print(f"p99 ITL, with short local prompts (e) / without (b): {ratios['e/b']:.2f}")
    print(f"p99 ITL, stranger (c) / alone (d): {ratios['c/d']:.2f}: what the shared memory takes")
    harness.warn_of_others(foreign)
    return {"phases": {phase.key: figures(phase, seen[phase.key]) for phase in PHASES}, "p99_ratios": ratios}


def figures(phase: Phase, seen: Seen) -> dict[str, object]:
    return {
        "name": phase.name,
        "num_gaps": len(seen.itl_ms),
        "itl_p50_ms": percentile(seen.itl_ms, 50),
        "itl_p99_ms": percentile(seen.itl_ms, 99),
        "itl_max_ms": percentile(seen.itl_ms, 100),
        "itl_p99_reading_ms": percentile(seen.itl_reading_ms, 99),
        "itl_p99_fifth_ms": percentile(seen.itl_fifth_ms, 99),
        "itl_p99_ms_by_round": [percentile(gaps, 99) for gaps in seen.itl_ms_by_round],
        "long_ttft_ms": seen.long_ttft_ms,
        "short_ttft_ms": seen.short_ttft_ms,
        "num_unseen_tokens": seen.num_unseen_tokens,
        "foreign_share": seen.foreign_share,
    }


def main() -> None:
    parser = harness.options(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each phase's window")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, min(args.seconds, 20.0)
    print(harness.heading(args), f" {args.seconds:g} s each")
    print(f"{NUM_STREAMS} streams; {LONG_TOKENS}-token prompts, one per {MEAN_ARRIVAL_S:g} s")
    prompts = Prompts(args.model)
    with (
        harness.serving(args.model, "--mixed", "2") as mixed,
        harness.serving(args.model, "--prefill", "1", "--decode", "1") as split,
    ):
        print(f"  {harness.check_pinned(mixed, ('mixed-0', 'mixed-1'))}")
        print(f"  {harness.check_pinned(split, ('prefill-0', 'decode-0'))}", flush=True)
        found = show(measure(args, prompts, mixed, split))
    harness.report_json("interference", args, {"seconds": args.seconds, **found})


if __name__ == "__main__":
    main()
