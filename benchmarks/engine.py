"""This engine beside other engines: same model, same prompts, same threads, one run, one table.

    python benchmarks/engine.py [--quick] [--peers LIST] [--threads 2,1] [--rounds 5] [--minutes 18] [--check-peers]

prefill N        tokens/s of reading one prompt of N tokens, its first answer token chosen
decode B @ C     tokens/s, summed over B sequences that each have C tokens behind them

Every engine is a process of its own, pinned to its cores; foreign ones live in virtual environments of their own, made
when they are missing (--check-peers does that and no more; llama.cpp is built from source, which takes minutes). All
engines of one thread count are loaded together and take turns cell by cell, in an order that rotates with the round;
figures are medians over the rounds. As many rounds are run as fit the time; the two longest cells take part in every
other one.

Beside speed: how far each engine's scores are from those of transformers in float32 over a fixed text, and how near
each cell is to what memory and arithmetic allow. The floor of a cell is the larger of (weights + KV) / read bandwidth
and operations / float32 rate, both measured in the same run; an engine that computes in 16 or 8 bits may pass it.
Last, what is wanted of each of ours (`peers/targets.py`), and the cells that miss it.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import disagg
from disagg.modelfiles.config import ModelConfig, read_config
from disagg.modelfiles.fetch import resolve_model
from harness import cpu_use, foreign_share, heading, options, report_json, warn_of_others
from peers import quality
from peers.catalog import DEFAULT_PEERS, OURS, Command, Entry, chosen_peers, command_of, our_entries
from peers.environments import Unavailable
from peers.fleet import CellFailed, RunningEngine, run_pinned, running
from peers.targets import best_peer, show_targets

PREFILL_TOKENS = (128, 512, 2048)
DECODE_CONTEXTS = (256, 1024)
DECODE_STEPS = {1: 8, 4: 6, 8: 4, 16: 3}  # timed steps of a cell, by rows
NUM_PROMPTS = max(DECODE_STEPS)
PIECES, PIECE_TOKENS, QUICK_PIECE_TOKENS = 8, 160, 16
REFERENCE = "transformers-fp32"
LIMITS_TIMEOUT_S = 120.0
FIRST_PROMPT_ID = 100  # ids below are special
KV_BYTES = {"float32": 4, "f32": 4, "float16": 2, "f16": 2, "bfloat16": 2, "bf16": 2, "u8": 1}


class Cell(msgspec.Struct, frozen=True):
    """batch 0: read a prompt of `context` tokens; else decode that many rows behind `context` tokens."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} @ {self.context}" if self.batch else f"prefill {self.context}"

    @property
    def is_long(self) -> bool:
        """Measured in every other round only."""
        return self.context == max(DECODE_CONTEXTS if self.batch else PREFILL_TOKENS) and self.batch in (0, NUM_PROMPTS)

    @property
    def num_tokens(self) -> int:
        """Tokens whose time one answer gives."""
        return self.batch * DECODE_STEPS[self.batch] if self.batch else self.context


class Limits(msgspec.Struct, frozen=True):
    """Of the machine, at one number of threads."""

    read_gb_s: float
    gemm_gflop_s: float
    bf16_gflop_s: float


class Measured(msgspec.Struct):
    """What one engine did at one number of threads. seconds and failures by cell name."""

    hello: dict[str, object]
    seconds: dict[str, list[float]] = {}
    failures: dict[str, str] = {}

    def tokens_per_s(self, cell: Cell) -> float:
        found = self.seconds.get(cell.name)
        return cell.num_tokens / statistics.median(found) if found else math.nan


class Workload:
    """Prompts of one run."""

    def __init__(self, config: ModelConfig, seed: int, cells: Sequence[Cell]) -> None:
        self._random = random.Random(seed)
        self._vocab_size = config.vocab_size
        longest = max((cell.context for cell in cells if cell.batch), default=0)
        self.contexts = [self.prompt(longest) for _ in range(NUM_PROMPTS)]

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_PROMPT_ID, self._vocab_size) for _ in range(num_tokens)]

    def request(self, cell: Cell) -> dict[str, object]:
        if cell.batch:
            return {
                "cell": "decode",
                "batch": cell.batch,
                "context": cell.context,
                "steps": DECODE_STEPS[cell.batch],
            }
        return {"cell": "prefill", "tokens": [self.prompt(cell.context)]}


# ---- measuring


def all_cells(is_quick: bool) -> list[Cell]:
    if is_quick:
        return [Cell(0, 128), Cell(0, 512), Cell(1, 256), Cell(8, 256)]
    prefill = [Cell(0, num_tokens) for num_tokens in PREFILL_TOKENS]
    return prefill + [Cell(batch, context) for context in DECODE_CONTEXTS for batch in DECODE_STEPS]


def measure_limits(num_threads: int) -> Limits:
    script = Path(disagg.__file__).parent / "engine" / "limits.py"
    try:
        line = run_pinned(script, [str(num_threads)], sys.executable, num_threads, LIMITS_TIMEOUT_S)
        return Limits(**json.loads(line))
    except (subprocess.SubprocessError, ValueError) as error:
        raise SystemExit(f"the limits of this machine could not be measured: {error}") from error


def warm_up(engines: list[RunningEngine], workload: Workload, results: dict[str, Measured]) -> None:
    """Load code paths and read contexts; what fails here is said, and tried again in the rounds."""
    context = len(workload.contexts[0])
    for engine in engines:
        try:
            engine.ask({"cell": "contexts", "tokens": workload.contexts})
            engine.ask({"cell": "prefill", "tokens": [workload.prompt(128)]})
            engine.ask({"cell": "decode", "batch": NUM_PROMPTS, "context": context, "steps": 2})
        except CellFailed as error:
            results[engine.name].failures["warm-up"] = str(error)
            print(f"  {engine.name}: warm-up failed: {error}", flush=True)


def measure(
    engines: list[RunningEngine], workload: Workload, cells: list[Cell], max_rounds: int, seconds: float
) -> dict[str, Measured]:
    """At least one round; another one as long as it is likely to end in time."""
    deadline_s = time.perf_counter() + seconds
    results = {engine.name: Measured(engine.hello._asdict()) for engine in engines}
    warm_up(engines, workload, results)
    longest_s = 0.0
    for number in range(max_rounds):
        start_s = time.perf_counter()
        if number and start_s + longest_s > deadline_s:
            break
        use = cpu_use()
        for place, cell in enumerate(cells):
            if cell.is_long and number % 2:
                continue
            request = workload.request(cell)
            shift = (number + place) % len(engines)
            for engine in engines[shift:] + engines[:shift]:
                result = results[engine.name]
                try:
                    result.seconds.setdefault(cell.name, []).append(engine.ask(request))
                except CellFailed as error:
                    if cell.name not in result.failures:
                        print(f"  {engine.name}: {cell.name} failed: {error}", flush=True)
                    result.failures[cell.name] = str(error)
        longest_s = max(longest_s, time.perf_counter() - start_s)
        others = foreign_share(use, cpu_use())
        used_s = time.perf_counter() - start_s
        print(f"  round {number + 1}: {used_s:.0f} s, others used {100 * others:.0f} % of the cores", flush=True)
    return results


def measure_quality(engines: list[RunningEngine], model: Path, piece_tokens: int) -> dict[str, quality.Quality]:
    """Of every engine that gives scores. The reference must be among them."""
    tokens = quality.pieces(model, PIECES, piece_tokens)
    found: dict[str, quality.Quality] = {}
    ordered = sorted(engines, key=lambda engine: engine.name != REFERENCE)
    if not ordered or ordered[0].name != REFERENCE:
        print(f"  no quality: the reference, {REFERENCE}, does not run")
        return found
    with tempfile.TemporaryDirectory(prefix="disagg-scores-") as folder:
        reference = Path(folder) / "reference.npy"
        for engine in ordered:
            path = reference if engine.name == REFERENCE else Path(folder) / "scores.npy"
            try:
                engine.ask({"cell": "quality", "tokens": tokens, "path": str(path)})
                found[engine.name] = quality.compare(path, reference, tokens)
                print(f"  {engine.name}: scores compared", flush=True)
            except (CellFailed, ValueError, OSError) as error:
                print(f"  {engine.name}: no quality: {error}", flush=True)
    return found


# ---- what is possible


def floor_s(cell: Cell, config: ModelConfig, measured: Measured, limits: Limits) -> float:
    """Seconds below which this engine's cell cannot fall on this machine, computing in float32."""
    weight_bytes = float(str(measured.hello["weight_bytes"]))
    kv_token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * KV_BYTES[str(measured.hello["kv"])]
    queries = config.num_heads * config.head_dim
    per_layer = config.hidden_size * (2 * queries + 2 * config.num_kv_heads * config.head_dim)
    per_layer += 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    if not cell.batch:
        seen = cell.context * (cell.context + 1) / 2
        operations = 2 * (cell.context * config.num_layers * per_layer + head) + 4 * config.num_layers * queries * seen
        num_bytes, repeats = weight_bytes, 1
    else:
        seen = cell.batch * cell.context
        operations = 2 * cell.batch * (config.num_layers * per_layer + head) + 4 * config.num_layers * queries * seen
        num_bytes, repeats = weight_bytes + seen * kv_token_bytes, DECODE_STEPS[cell.batch]
    return repeats * max(num_bytes / limits.read_gb_s, operations / limits.gemm_gflop_s) / 1e9


# ---- showing


def show_table(title: str, names: Sequence[str], cells: Sequence[Cell], values: dict[str, list[str]]) -> None:
    width = max(len(name) for name in names) + 2
    print(f"\n{title}")
    heads = [cell.name.replace("prefill ", "pf ").replace("decode ", "d").replace(" @ ", "@") for cell in cells]
    print(" " * width + "".join(f"{head:>10}" for head in heads))
    for name in names:
        print(f"{name:<{width}}" + "".join(f"{value:>10}" for value in values[name]))


def show(
    results: dict[str, Measured],
    entries: list[Entry],
    cells: list[Cell],
    config: ModelConfig,
    limits: Limits,
    num_threads: int,
) -> dict[str, object]:
    """Tables of one number of threads; what they hold for the JSON line."""
    names = [entry.name for entry in entries if entry.name in results]
    rates = {name: [results[name].tokens_per_s(cell) for cell in cells] for name in names}
    shares = {
        name: [
            floor_s(cell, config, results[name], limits) * rate / cell.num_tokens
            for cell, rate in zip(cells, rates[name], strict=True)
        ]
        for name in names
    }
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    show_table(f"tokens/s, {threads}", names, cells, {n: [f"{rate:.0f}" for rate in rates[n]] for n in names})
    title = f"share of what memory and float32 arithmetic allow, %, {threads}"
    show_table(title, names, cells, {n: [f"{100 * share:.0f}" for share in shares[n]] for n in names})
    ratios: dict[str, dict[str, object]] = {}
    print(f"\nours / the fastest peer of at least the same precision, {threads}")
    for ours in (entry for entry in entries if entry.family == OURS and entry.name in results):
        for cell, rate in zip(cells, rates[ours.name], strict=True):
            name, best = best_peer(cell, ours, entries, results)
            ratios.setdefault(ours.name, {})[cell.name] = {"ratio": rate / best, "best_peer": name}
            print(
                f"  {ours.name:18} {cell.name:18} {rate:8.0f} / {best:8.0f} = {rate / best:5.2f}   {name or 'no peer'}"
            )
    return {
        "engines": {name: result.hello for name, result in results.items()},
        "tokens_per_s": {name: _by_cell(cells, rates[name]) for name in names},
        "attained_share": {name: _by_cell(cells, shares[name]) for name in names},
        "ratio_to_best_peer": ratios,
        "targets": show_targets(entries, cells, results, shares),
        "seconds": {name: results[name].seconds for name in names},
        "failures": {name: results[name].failures for name in names if results[name].failures},
        "limits": msgspec.structs.asdict(limits),
    }


def _by_cell(cells: Sequence[Cell], values: Sequence[float]) -> dict[str, float | None]:
    pairs = zip(cells, values, strict=True)
    return {cell.name: None if math.isnan(value) else round(value, 4) for cell, value in pairs}


def show_quality(found: dict[str, quality.Quality], num_tokens: int) -> None:
    if not found:
        return
    print(f"\nquality over {num_tokens} tokens (text {quality.digest()}), against {REFERENCE}")
    print(f"  {'':22}{'perplexity':>12}{'mean KL':>12}{'top-1 agreement':>18}")
    for name, each in found.items():
        print(f"  {name:22}{each.perplexity:12.3f}{each.kl:12.2e}{100 * each.top1_agreement:17.1f}%")


def show_engines(engines: list[RunningEngine]) -> None:
    for engine in engines:
        hello = engine.hello
        print(
            f"  {engine.name}: {hello.version}; weights {hello.weight_bytes / 1e6:.0f} MB {hello.precision}, "
            f"KV {hello.kv}; {hello.note}",
            flush=True,
        )


# ---- the run


def find_commands(entries: list[Entry], model: Path) -> list[Command]:
    """Of all that can be had; the others are named with the reason."""
    commands: list[Command] = []
    for entry in entries:
        try:
            commands.append(command_of(entry, model))
        except Unavailable as error:
            print(f"  {entry.name}: SKIPPED, {error}", flush=True)
    return commands


def check_peers(commands: list[Command], config: ModelConfig, num_threads: int, seed: int) -> None:
    """One tiny cell of each."""
    workload = Workload(config, seed, [Cell(4, 32)])
    with running(commands, num_threads) as engines:
        for engine in engines:
            try:
                engine.ask({"cell": "contexts", "tokens": workload.contexts})
                read_s = engine.ask({"cell": "prefill", "tokens": [workload.prompt(32)]})
                decode_s = engine.ask({"cell": "decode", "batch": 4, "context": 32, "steps": 2})
                print(f"  {engine.name}: works ({read_s:.3f} s, {decode_s:.3f} s)")
            except CellFailed as error:
                print(f"  {engine.name}: FAILED, {error}")


def parse() -> argparse.Namespace:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--peers", default=DEFAULT_PEERS, help="names or families, comma-separated")
    parser.add_argument("--threads", default="", help="comma-separated; default 2,1 (--quick: 2)")
    parser.add_argument("--minutes", type=float, default=18.0, help="rounds end by then")
    parser.add_argument("--check-peers", action="store_true", help="set up all peers and run one tiny cell of each")
    args = parser.parse_args()
    args.threads = [int(each) for each in (args.threads or ("2" if args.quick else "2,1")).split(",")]
    if args.quick:
        args.rounds, args.minutes = 1, min(args.minutes, 3.0)
    return args


def main() -> None:
    args = parse()
    model = resolve_model(args.model, report=print)
    config = read_config(model)
    entries = our_entries() + chosen_peers(args.peers)
    print(heading(args), "interleaved")
    commands = find_commands(entries, model)
    if args.check_peers:
        check_peers(commands, config, max(args.threads), args.seed)
        return
    cells = all_cells(args.quick)
    piece_tokens = QUICK_PIECE_TOKENS if args.quick else PIECE_TOKENS
    deadline_s = time.perf_counter() + 60.0 * args.minutes
    figures: dict[str, object] = {}
    found: dict[str, quality.Quality] = {}
    shares: list[float] = []
    for number, num_threads in enumerate(args.threads):
        limits = measure_limits(num_threads)
        print(
            f"\nthreads: {num_threads}; reads {limits.read_gb_s:.1f} GB/s, "
            f"GEMM {limits.gemm_gflop_s:.0f} GFLOP/s in float32, {limits.bf16_gflop_s:.0f} in bfloat16"
        )
        with running(commands, num_threads) as engines:
            show_engines(engines)
            use = cpu_use()
            if number == 0:
                found = measure_quality(engines, model, piece_tokens)
            weights = [1.0 / each for each in args.threads[number:]]  # half the threads take twice the time
            seconds = (deadline_s - time.perf_counter()) * weights[0] / sum(weights)
            results = measure(engines, Workload(config, args.seed, cells), cells, args.rounds, seconds)
            shares.append(foreign_share(use, cpu_use()))
        figures[f"threads {num_threads}"] = show(results, entries, cells, config, limits, num_threads)
    show_quality(found, PIECES * piece_tokens)
    warn_of_others(max(shares))
    by_name = {name: msgspec.structs.asdict(each) for name, each in found.items()}
    report_json("engine", args, {**figures, "quality": by_name, "foreign_share": max(shares)})


if __name__ == "__main__":
    main()
