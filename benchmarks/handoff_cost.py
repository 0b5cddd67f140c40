"""What the hand-off costs a lone request: layer-wise and synchronous hand-off against one mixed worker.

    python benchmarks/handoff_cost.py [--rounds 10] [--quick]

Three servers stay up, each with two workers that have a core each; only one is busy at a time. A round sends one prompt
to each in turn, in an order that rotates. The mixed server has a second worker too, which stays idle: so both sides
read the prompt with the same threads on the same core. Ratios are taken within a round, then their median.

TTFT             request sent -> token 1
time to token 2  request sent -> token 2: what shows of the transfer, the decode queue and the first step lies in here
hidden share     bytes that the destination had acknowledged before the prompt was computed, of all bytes
checksum share   time to sum the KV of one prompt, as either end does, over TTFT. The source's sums are part of its TTFT
                 at most; the destination's come while the prompt is read, and are that share of its gaps at most
"""

import asyncio
import contextlib
import itertools
import random
import statistics
import time

import msgspec
import numpy as np

from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.segments import span_segments
from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, PUSHES
from disagg.testing.processes import Serve, wait_until
from disagg.transport.runs import RunSum
from harness import (
    Metrics,
    Prompts,
    Server,
    check_pinned,
    cpu_use,
    foreign_share,
    heading,
    options,
    report_json,
    scrape,
    serving,
    verdict,
    wait_idle,
    warn_of_others,
)
from token_stream import TokenStream

PROMPT_TOKENS = 1024
ANSWER_TOKENS = 8
ANSWER_TIMEOUT_S = 120.0
COUNTERS_TIMEOUT_S = 10.0
MAX_TTFT_RATIO = 1.03
MAX_TOKEN_2_RATIO = 1.05
MAX_CHECKSUM_SHARE = 0.02
NUM_SUMS = 15
KV_MEMORY = "256M"  # several prompts; small, so that the warm-up has touched all of it

SPLIT = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--kv-memory", KV_MEMORY)
SIDES = {
    "layerwise": (*SPLIT, "--handoff", "layerwise"),
    "sync": (*SPLIT, "--handoff", "sync"),
    "mixed": ("--mixed", "2", "--kv-memory", KV_MEMORY),
}
BASELINE = "mixed"


class Times(msgspec.Struct, frozen=True):
    """One request, in ms."""

    ttft_ms: float
    token_2_ms: float
    itl_ms: float  # median of the gaps after token 2

    @property
    def first_gap_ms(self) -> float:
        return self.token_2_ms - self.ttft_ms


class Transfer(msgspec.Struct, frozen=True):
    """Counters of one side's hand-offs."""

    num_handoffs: int
    num_pushes: int
    hidden_bytes: int
    visible_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.hidden_bytes + self.visible_bytes

    @property
    def hidden_share(self) -> float:
        return self.hidden_bytes / self.num_bytes if self.num_bytes else float("nan")


async def ask(server: Server, body: dict[str, object]) -> tuple[Times, str]:
    """Send one request alone; its times and its text. Raises SystemExit when tokens cannot be told apart."""
    stream = await TokenStream.open(server.url, body)
    await stream.finish(ANSWER_TIMEOUT_S)
    usage = stream.usage
    if usage.completion_tokens != len(stream.token_s) or usage.prompt_tokens_details["cached_tokens"]:
        raise SystemExit(f"{len(stream.token_s)} events with text, but {usage}: these times would mean nothing")
    at_ms = [1e3 * (token_s - stream.sent_s) for token_s in stream.token_s]
    gaps = [after - before for before, after in itertools.pairwise(at_ms[1:])]
    await wait_idle(server)
    return Times(at_ms[0], at_ms[1], statistics.median(gaps)), stream.text


def transfer(metrics: Metrics) -> Transfer:
    def total(name: str, label: str = "") -> int:
        return int(metrics.get((name, "prefill-0", label), 0))

    return Transfer(
        total(HANDOFFS.name, "sent"),
        total(PUSHES.name),
        total(HANDOFF_BYTES.name, "hidden"),
        total(HANDOFF_BYTES.name, "visible"),
    )


async def settled_transfer(server: Server, num_handoffs: int) -> Transfer:
    """Counters travel with the workers' reports: wait for those that know of every hand-off. Raises InternalFault."""
    found: list[Transfer] = []

    def is_settled() -> bool:
        found.append(transfer(scrape(server)))
        return found[-1].num_handoffs >= num_handoffs

    await asyncio.to_thread(wait_until, is_settled, COUNTERS_TIMEOUT_S, f"the counters of {num_handoffs} hand-offs")
    return found[-1]


async def measure(
    servers: dict[str, Serve], prompts: Prompts, rng: random.Random, num_rounds: int
) -> tuple[dict[str, list[Times]], dict[str, Transfer]]:
    """Times by side and round; what the hand-offs of the measured rounds moved."""
    times: dict[str, list[Times]] = {side: [] for side in servers}
    num_warm = 5  # prompts that fill the KV memory once, so that no measured one is the first to touch a page
    before: dict[str, Transfer] = {}
    for number in range(-num_warm, num_rounds):
        if number == 0:
            before = {s: await settled_transfer(servers[s], num_warm) for s in servers if s != BASELINE}
        body = prompts.body(rng, PROMPT_TOKENS, ANSWER_TOKENS)
        order = [list(servers)[(place + number) % len(servers)] for place in range(len(servers))]
        texts = set()
        for side in order:
            found, text = await ask(servers[side], body)
            texts.add(text)
            if number >= 0:
                times[side].append(found)
        if len(texts) != 1:
            raise SystemExit(f"the sides answered differently: {sorted(texts)}")
        if number >= 0:
            shown = "  ".join(f"{s} {times[s][-1].ttft_ms:.0f}/{times[s][-1].token_2_ms:.0f}" for s in servers)
            print(f"  round {number + 1}: TTFT/token 2, ms: {shown}", flush=True)
    after = {s: await settled_transfer(servers[s], num_warm + num_rounds) for s in before}
    return times, {s: _minus(after[s], before[s]) for s in before}


def _minus(after: Transfer, before: Transfer) -> Transfer:
    pairs = zip(msgspec.structs.astuple(after), msgspec.structs.astuple(before), strict=True)
    return Transfer(*(mine - theirs for mine, theirs in pairs))


def checksum_s(layout: KvLayout) -> float:
    """To sum the KV of a prompt at one end: layer by layer, out of scattered blocks that are in no cache."""
    num_blocks = 4 * PROMPT_TOKENS // layout.block_size
    blocks = [BlockId(each) for each in random.Random(0).sample(range(num_blocks), PROMPT_TOKENS // layout.block_size)]
    arena = np.ones(layout.arena_bytes(num_blocks), np.uint8)
    spans = (Span(0, PROMPT_TOKENS, layer, layer + 1) for layer in range(layout.num_layers))
    pushes = [span_segments(layout, num_blocks, blocks, span) for span in spans]
    taken = []
    for _ in range(NUM_SUMS):
        started_s = time.perf_counter()
        for runs in pushes:
            RunSum(arena, runs).finish()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)


def show_checksums(ttft_ms: float, layout: KvLayout, foreign: float) -> dict[str, float]:
    """Print; the figures for the JSON line."""
    sum_ms = 1e3 * checksum_s(layout)
    print(f"\nchecksums of one hand-off: {sum_ms:.1f} ms at either end, of a TTFT of {ttft_ms:.0f} ms")
    share = sum_ms / ttft_ms
    print(verdict("share of TTFT, and of the gaps between tokens while KV arrives", share, MAX_CHECKSUM_SHARE, foreign))
    return {"checksum_ms": sum_ms, "checksum_share": share}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):9.1f} [{min(values):.1f} .. {max(values):.1f}]"


def ratios(times: dict[str, list[Times]], side: str, field: str) -> list[float]:
    """Side over baseline, round by round."""
    pairs = zip(times[side], times[BASELINE], strict=True)
    return [getattr(mine, field) / getattr(theirs, field) for mine, theirs in pairs]


def show(
    times: dict[str, list[Times]], moved: dict[str, Transfer], due_bytes: int, foreign: float
) -> dict[str, object]:
    """Print; the figures for the JSON line."""
    fields = ("ttft_ms", "token_2_ms", "first_gap_ms", "itl_ms")
    print("\nmedian [least .. most], ms")
    for side, found in times.items():
        shown = "   ".join(f"{field[:-3]} {spread([getattr(each, field) for each in found])}" for field in fields)
        print(f"  {side:10} {shown}")
    for side, each in moved.items():
        print(
            f"  {side}: {each.num_bytes / each.num_handoffs / 1e6:.1f} MB per hand-off (the prompt's KV is "
            f"{due_bytes / 1e6:.1f} MB) in {each.num_pushes / each.num_handoffs:.0f} pushes, "
            f"{100 * each.hidden_share:.1f} % hidden"
        )
    by_side = {s: {f: statistics.median(ratios(times, s, f)) for f in fields[:2]} for s in moved}
    print()
    for side, each_ratio in by_side.items():
        print(verdict(f"{side} / mixed, TTFT", each_ratio["ttft_ms"], MAX_TTFT_RATIO, foreign))
        print(verdict(f"{side} / mixed, time to token 2", each_ratio["token_2_ms"], MAX_TOKEN_2_RATIO, foreign))
    warn_of_others(foreign)
    medians = {s: {f: statistics.median(getattr(t, f) for t in found) for f in fields} for s, found in times.items()}
    transfers = {s: {**msgspec.structs.asdict(t), "hidden_share": t.hidden_share} for s, t in moved.items()}
    raw = {s: [msgspec.structs.asdict(t) for t in found] for s, found in times.items()}
    return {"median_ms": medians, "ratio_to_mixed": by_side, "transfer": transfers, "times": raw}


def main() -> None:
    args = options(__doc__, rounds=10).parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 3)
    prompts = Prompts(args.model)
    layout = prompts.config.kv_layout(16)
    due_bytes = layout.span_bytes(Span(0, PROMPT_TOKENS, 0, layout.num_layers))
    print(heading(args), "interleaved")
    print(f"a lone {PROMPT_TOKENS}-token prompt, {ANSWER_TOKENS} tokens of answer, greedy, no prefix reuse")
    with contextlib.ExitStack() as stack:
        servers = {side: stack.enter_context(serving(args.model, *pools)) for side, pools in SIDES.items()}
        for side, server in servers.items():
            names = ("mixed-0", "mixed-1") if side == BASELINE else ("prefill-0", "decode-0")
            print(f"  {side}: {check_pinned(server, names)}", flush=True)
        use = cpu_use()
        times, moved = asyncio.run(measure(servers, prompts, random.Random(args.seed), args.rounds))
        foreign = foreign_share(use, cpu_use())
        figures = show(times, moved, due_bytes, foreign)
    sums = show_checksums(statistics.median(each.ttft_ms for each in times["layerwise"]), layout, foreign)
    report_json("handoff_cost", args, {"prompt_tokens": PROMPT_TOKENS, "foreign_share": foreign, **figures, **sums})


if __name__ == "__main__":
    main()
