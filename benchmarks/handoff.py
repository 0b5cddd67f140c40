"""The hand-off over links of several speeds: layer-wise, compressed and synchronous beside one mixed worker.

    python benchmarks/handoff.py [--rounds 3] [--links NAME ...] [--lengths N ...] [--sweep | --no-sweep]
        [--paced] [--quick]

Links: one host (shared memory; TCP) and two network namespaces with an emulated link between them, which need root:
1 Gbit/s, 1 Gbit/s with 5 ms more there and back, 100 Mbit/s. There the data go under mutual TLS, as between machines.
A prefill and a decode worker have a core each; the mixed one has one too. The sides of a link are up together and are
asked in turn, one lone prompt at a time, in an order that rotates; ratios are taken within a round, then their median.

TTFT, token 2    request sent -> token 1, token 2
wire time        what all bytes of the hand-off take at the link's rate
line use         bytes on the wire from the first push to the last, over what the link carries in that time
hidden share     bytes acknowledged before the prompt was computed, of all bytes
last push        wire time of the layers that are pushed after the last one is computed, and one round trip
sweep            the layer-wise side with several --min-push-bytes, on the links that are emulated

Where the wire takes less time than the prompt, token 2 is to come within 5 % and the last push of the mixed worker's;
where it takes longer, nothing but the link is to be waited for: line use. The wire's own time is what the link's rate
says, on one host what the worker has learned.

--paced: on a device whose speed holds still (paced.py). All is there but the moods of a shared machine, which are
larger than 5 %; and, as with a GPU, the host's cores have time for the hand-off beside a step.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import httpx
import msgspec

import harness
import paced
from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.core.spans import KvLayout, Span
from disagg.modelfiles.fetch import resolve_model, served_name
from disagg.testing.links.cluster import SpreadCluster
from disagg.testing.links.namespaces import DEVICES, LinkedNamespaces, bytes_sent, missing
from disagg.testing.links.shape import LinkShape
from disagg.worker.config import WorkerConfig
from handoff_cost import Times, Transfer, ask, settled_transfer
from harness import Prompts, Server, serving

MIXED, SYNC, LAYERWISE, COMPRESSED = "mixed", "sync", "layerwise", "layerwise int8"
MODES = {
    SYNC: ("--handoff", "sync"),
    LAYERWISE: ("--handoff", "layerwise"),
    COMPRESSED: ("--handoff", "layerwise", "--kv-wire", KvWire.INT8.value, "--numerics", "bounded"),
}
# Few large packets: the process that delays them takes its time from the workers' cores.
DELAYED_MTU = 65000
LINKS: dict[str, LinkShape | None] = {
    "shared memory": None,
    "tcp": None,
    "1 Gbit/s": LinkShape(1000),
    "1 Gbit/s + 5 ms": LinkShape(1000, 0.005, DELAYED_MTU),
    "100 Mbit/s": LinkShape(100),
}
LENGTHS = (256, 1024, 4096)
SWEEP_BYTES = {"256K": 256 << 10, "1M": 1 << 20, "2M": 2 << 20, "4M": 4 << 20, "16M": 16 << 20}
SWEEP_TOKENS = 1024
BLOCK_SIZE = 16
ANSWER_TOKENS = 6
NUM_WARM = 2  # of the longest prompt: after these no page of the KV memory is new
SAMPLE_S = 0.002
EDGE_BYTES = 64 << 10  # of a hand-off's, not counted at either end: control messages come before and after
MAX_EXCESS = 1.05
MIN_LINE_USE = 0.9
WIRE_SHARE = 0.1  # of the prompt's time; from there on layer-wise must beat synchronous
DEFAULTS = WorkerConfig(model="-", served_name="-", role=Role.PREFILL, worker_id="-", router_address="")


class Side(msgspec.Struct):
    """One cluster of a link."""

    name: str
    server: Server
    min_push_bytes: int = DEFAULTS.min_push_bytes
    wire: KvWire = KvWire.NATIVE
    num_asked: int = 0

    @property
    def is_mixed(self) -> bool:
        return self.name == MIXED


class Asked(msgspec.Struct, frozen=True):
    """One request."""

    times: Times
    wire_bytes: int  # packets; 0 where no link was watched
    line_use: float  # nan likewise


class LineWatch:
    """Reads what a device has sent, all the time while it is entered, on a thread at this end of the link."""

    def __init__(self, shape: LinkShape) -> None:
        self._shape = shape
        self._samples: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="line-watch")

    def __enter__(self) -> "LineWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self._samples.append((time.perf_counter(), bytes_sent(DEVICES[0])))

    def found(self) -> tuple[int, float]:
        """(bytes, line use) of the hand-off that was watched."""
        before, after = self._samples[0][1], self._samples[-1][1]
        inner = [each for each in self._samples if before + EDGE_BYTES < each[1] < after - EDGE_BYTES]
        if len(inner) < 2:
            return after - before, float("nan")
        (start_s, first), (stop_s, last) = inner[0], inner[-1]
        return after - before, (last - first) / (stop_s - start_s) / self._shape.bytes_per_s


# ---- clusters


@contextlib.contextmanager
def clusters(
    args: argparse.Namespace, name: str, flags: Mapping[str, Sequence[str]], kv_memory: str
) -> Iterator[tuple[dict[str, Server], LinkShape | None]]:
    """A server per side, all up; this thread is at the clients' end of the link."""
    shape = LINKS[name]
    program, flags_of_all = args.device.program, args.device.flags
    more = ("--kv-memory", kv_memory, *flags_of_all)
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        if shape is None:
            split = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0")
            transport = ("--transport", "auto" if name == "shared memory" else "tcp")
            for side, own in flags.items():
                pools = ("--mixed", "2") if side == MIXED else (*split, *transport, *own)
                servers[side] = stack.enter_context(serving(args.model, *pools, *more, program=program))
        else:
            pair = stack.enter_context(LinkedNamespaces(shape))
            stack.enter_context(pair.entered(0))
            cores = sorted(os.sched_getaffinity(0))
            path, served = resolve_model(args.model), served_name(args.model)
            for side, own in flags.items():
                if side == MIXED:
                    server: Server = stack.enter_context(serving(args.model, "--mixed", "2", *more, program=program))
                else:
                    places = (str(cores[0]), str(cores[1 % len(cores)]))
                    spread = SpreadCluster(pair, path, served, (*more, *own), cores=places, program=program)
                    server = stack.enter_context(spread)
                servers[side] = server
        yield servers, shape


async def ask_watched(server: Server, body: dict[str, object], shape: LinkShape | None) -> tuple[Asked, str]:
    if shape is None:
        times, text = await ask(server, body)
        return Asked(times, 0, float("nan")), text
    with LineWatch(shape) as watch:
        times, text = await ask(server, body)
    return Asked(times, *watch.found()), text


async def warm(sides: Sequence[Side], prompts: Prompts, rng: random.Random, num_tokens: int) -> None:
    """Fill the KV memory of every side."""
    for _ in range(NUM_WARM):
        body = prompts.body(rng, num_tokens, ANSWER_TOKENS)
        for side in sides:
            await ask(side.server, body)
            side.num_asked += 1


async def measure(
    sides: Sequence[Side], shape: LinkShape | None, prompts: Prompts, rng: random.Random, num_tokens: int, rounds: int
) -> tuple[dict[str, list[Asked]], dict[str, float]]:
    """By side: each round; the hidden share. Raises SystemExit when sides of one numerics answer differently."""
    found: dict[str, list[Asked]] = {each.name: [] for each in sides}
    handing = [side for side in sides if not side.is_mixed]
    before = {side.name: await settled_transfer(side.server, side.num_asked) for side in handing}
    for turn in range(rounds):
        body = prompts.body(rng, num_tokens, ANSWER_TOKENS)
        texts = set()
        for place in range(len(sides)):
            side = sides[(place + turn) % len(sides)]
            asked, text = await ask_watched(side.server, body, None if side.is_mixed else shape)
            side.num_asked += 1
            found[side.name].append(asked)
            if side.wire is KvWire.NATIVE:
                texts.add(text)
        if len(texts) != 1:
            raise SystemExit(f"the sides answered differently: {sorted(texts)}")
        print(f"  {num_tokens} tokens, TTFT/token 2, ms: {_shown(found)}", flush=True)
    after = {side.name: await settled_transfer(side.server, side.num_asked) for side in handing}
    return found, {name: hidden_share(before[name], after[name]) for name in before}


def _shown(found: Mapping[str, Sequence[Asked]]) -> str:
    last = {side: asked[-1].times for side, asked in found.items()}
    return "  ".join(f"{side} {times.ttft_ms:.0f}/{times.token_2_ms:.0f}" for side, times in last.items())


# ---- figures


def last_push_bytes(layout: KvLayout, num_tokens: int, side: Side) -> int:
    """Of the layers that are pushed together when the last one of the last chunk is computed."""
    chunk = num_tokens % DEFAULTS.chunk_tokens or min(num_tokens, DEFAULTS.chunk_tokens)
    per_layer = layout.span_bytes(Span(0, chunk, 0, 1), side.wire)
    each = min(layout.num_layers, max(1, -(-side.min_push_bytes // per_layer)))
    return per_layer * (layout.num_layers % each or each)


def learned_rate(server: Server) -> float:
    """Bytes per second from prefill to decode, as the worker has seen it; nan while it knows nothing."""
    view = httpx.get(f"{server.url}/cluster", timeout=10.0, trust_env=False).json()
    rates = [link["bytes_per_s"] for each in view["workers"] for link in each["state"]["links"]]
    return max(rates, default=0.0) or float("nan")


class Figures(msgspec.Struct, frozen=True):
    """One side of one link at one length; medians."""

    ttft_ms: float
    token_2_ms: float
    ttft_ratio: float  # over mixed, as the next
    token_2_ratio: float
    wire_ms: float = 0.0
    last_push_ms: float = 0.0
    wire_mb: float = 0.0
    line_use: float = float("nan")
    hidden_share: float = float("nan")
    excess: float = float("nan")  # token 2 over mixed's plus the last push


def figures(
    found: Mapping[str, Sequence[Asked]],
    side: Side,
    num_tokens: int,
    layout: KvLayout,
    link: tuple[float, float],
    hidden: float,
) -> Figures:
    """link: bytes per second, seconds there and back."""
    mine, mixed = found[side.name], found[MIXED]
    median = statistics.median
    pairs = [(each.times, other.times) for each, other in zip(mine, mixed, strict=True)]
    base = Figures(
        median(each.ttft_ms for each, _ in pairs),
        median(each.token_2_ms for each, _ in pairs),
        median(each.ttft_ms / other.ttft_ms for each, other in pairs),
        median(each.token_2_ms / other.token_2_ms for each, other in pairs),
    )
    if side.is_mixed:
        return base
    bytes_per_s, round_trip_s = link
    whole = layout.span_bytes(Span(0, num_tokens, 0, layout.num_layers), side.wire)
    last_ms = 1e3 * (last_push_bytes(layout, num_tokens, side) / bytes_per_s + round_trip_s)
    return msgspec.structs.replace(
        base,
        wire_ms=1e3 * whole / bytes_per_s,
        last_push_ms=last_ms,
        wire_mb=median(each.wire_bytes for each in mine) / 1e6 or whole / 1e6,
        line_use=median(each.line_use for each in mine),
        hidden_share=hidden,
        excess=median(each.token_2_ms / (other.token_2_ms + last_ms) for each, other in pairs),
    )


def show(name: str, num_tokens: int, rows: Mapping[str, Figures], foreign: float) -> None:
    print(f"\n{name}, {num_tokens} tokens (medians)")
    heads = f"{'TTFT':>8} {'token 2':>8} {'/mixed':>7} {'wire':>8} {'last':>6} {'MB':>7} {'line':>6} {'hidden':>7}"
    print(f"  {'':22} {heads}")
    for side, row in rows.items():
        print(
            f"  {side:22} {row.ttft_ms:8.0f} {row.token_2_ms:8.0f} {row.token_2_ratio:7.3f} {row.wire_ms:8.0f}"
            f" {row.last_push_ms:6.1f} {row.wire_mb:7.1f} {100 * row.line_use:5.0f}% {100 * row.hidden_share:6.0f}%"
        )
    prompt_ms = rows[MIXED].ttft_ms
    for side in (LAYERWISE, COMPRESSED):
        if side not in rows:
            continue
        row = rows[side]
        if row.wire_ms < prompt_ms:
            text = f"  {side}: token 2 / (mixed's + last push)"
            print(harness.verdict(text, row.excess, MAX_EXCESS, foreign))
        elif row.line_use == row.line_use:
            print(harness.verdict(f"  {side}: 1 / line use", 1 / row.line_use, 1 / MIN_LINE_USE, foreign))
    if {LAYERWISE, SYNC} <= rows.keys() and rows[SYNC].wire_ms >= WIRE_SHARE * prompt_ms:
        ratio = rows[LAYERWISE].token_2_ms / rows[SYNC].token_2_ms
        print(harness.verdict("  layerwise / sync, token 2", ratio, 1.0, foreign))


def run(
    args: argparse.Namespace, name: str, prompts: Prompts, variants: Mapping[str, tuple[Sequence[str], int]]
) -> dict[str, object]:
    """One link. variants: flags and smallest push by side."""
    layout = prompts.config.kv_layout(BLOCK_SIZE)
    longest = layout.span_bytes(Span(0, max(args.lengths), 0, layout.num_layers))
    kv_memory = f"{max(64 << 20, longest * 5 // 4)}"
    print(f"\n== {name}: {', '.join(variants)}", flush=True)
    with clusters(args, name, {side: flags for side, (flags, _) in variants.items()}, kv_memory) as (servers, shape):
        sides = [
            Side(side, servers[side], push, KvWire.INT8 if "int8" in flags else KvWire.NATIVE)
            for side, (flags, push) in variants.items()
        ]
        use = harness.cpu_use()
        rng = random.Random(args.seed)
        asyncio.run(warm(sides, prompts, rng, max(args.lengths)))
        found = {
            length: asyncio.run(measure(sides, shape, prompts, rng, length, args.rounds)) for length in args.lengths
        }
        foreign = paced.foreign_share(args, use, harness.cpu_use())
        by_length: dict[str, object] = {}
        for length, (asked, hidden) in found.items():
            rows = {}
            for side in sides:
                rate = shape.bytes_per_s if shape else learned_rate(side.server)
                link = (rate, shape.round_trip_s if shape else 0.0)
                rows[side.name] = figures(asked, side, length, layout, link, hidden.get(side.name, float("nan")))
            show(name, length, rows, foreign)
            by_length[str(length)] = {side: msgspec.structs.asdict(row) for side, row in rows.items()}
    harness.warn_of_others(foreign)
    return {"foreign_share": foreign, "lengths": by_length}


def hidden_share(before: Transfer, after: Transfer) -> float:
    """Of what went between two readings."""
    num_bytes = after.num_bytes - before.num_bytes
    return (after.hidden_bytes - before.hidden_bytes) / num_bytes if num_bytes else float("nan")


def main() -> None:
    parser = harness.options(__doc__, rounds=3)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS), metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="N")
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, help="only the sweep; or all but it")
    paced.add_option(parser)
    args = parser.parse_args()
    args.device = paced.device(args)
    if args.quick:
        args.rounds, args.lengths = 1, [256]
    prompts = Prompts(args.model)
    print(harness.heading(args), "interleaved")
    dtype = prompts.config.kv_layout(BLOCK_SIZE).dtype
    print(f"lone prompts, {ANSWER_TOKENS} tokens of answer, greedy, no prefix reuse, KV {dtype}")
    print("all sides:", *args.device.flags, "(steps take the time that paced.py says)" if args.paced else "")
    default = DEFAULTS.min_push_bytes
    modes = {MIXED: ((), default), **{side: (flags, default) for side, flags in MODES.items()}}
    results: dict[str, object] = {}
    sweeps: dict[str, object] = {}
    with paced.watched(args):
        for name in args.links:
            shape = LINKS[name]
            if shape is not None and (reason := missing(shape)):
                print(f"\n== {name}: SKIPPED, {reason}")
                continue
            if args.sweep is not True:
                results[name] = run(args, name, prompts, modes)
            if args.sweep is not False and shape is not None and not args.quick:
                pushes = {
                    f"{text} a push": ((*MODES[LAYERWISE], "--min-push-bytes", text), size)
                    for text, size in SWEEP_BYTES.items()
                }
                single = argparse.Namespace(**{**vars(args), "lengths": [SWEEP_TOKENS]})
                sweeps[name] = run(single, name, prompts, {MIXED: ((), default), **pushes})
    harness.report_json("handoff", args, {"links": results, "sweep_min_push_bytes": sweeps})


if __name__ == "__main__":
    main()
