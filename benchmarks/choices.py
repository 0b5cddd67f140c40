"""Several answers to one prompt: one request for all of them against as many requests at once for one each.

    python benchmarks/choices.py [--rounds 5] [--choices 4] [--prompt-tokens 512] [--quick]

The baseline is what a request for several answers comes to when its choices know nothing of each other: each prompt is
read, and handed over, by itself. Two servers stay up, one with a prefill and a decode worker, one with a mixed worker;
both sides are asked in turn, in an order that rotates, each time with a prompt that nobody has seen. Ratios are taken
within a round, then their median.

first TTFT, last TTFT    request(s) sent -> the first token of the first answer, of the last answer to begin
read, received           prompt tokens computed by all workers, and whose KV came from a peer
handed over              bytes of KV that the destination has acknowledged
"""

import asyncio
import contextlib
import random
import statistics
import time

import httpx
import msgspec

from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_RECEIVED, SEQUENCES
from disagg.testing.processes import wait_until
from harness import Prompts, Server, heading, options, report_json, scrape, serving, wait_idle

ANSWER_TOKENS = 8
TIMEOUT_S = 120.0
SERVERS = {
    "split": ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--kv-memory", "256M"),
    "mixed": ("--mixed", "1", "--kv-memory", "256M"),
}
TOGETHER, APART = "one request", "apart"


class Counted(msgspec.Struct, frozen=True):
    """Totals over the workers of one server."""

    num_read: int
    num_received: int
    num_handoffs: int
    handoff_bytes: int
    num_ended: int


class Asked(msgspec.Struct, frozen=True):
    """One side of one round."""

    first_ms: float
    last_ms: float
    counted: Counted


class _Choice(msgspec.Struct):
    index: int


class _Event(msgspec.Struct):
    choices: list[_Choice]


async def first_tokens(client: httpx.AsyncClient, body: dict[str, object]) -> list[float]:
    """Times at which each choice began, by the clock of perf_counter."""
    begun: dict[int, float] = {}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in msgspec.json.decode(line[6:], type=_Event).choices:
                    begun.setdefault(choice.index, time.perf_counter())
    return list(begun.values())


def counted(server: Server) -> Counted:
    found = scrape(server)

    def total(name: str, *labels: str) -> int:
        return int(
            sum(value for (own, _, label), value in found.items() if own == name and (not labels or label in labels))
        )

    return Counted(
        num_read=total(PROMPT_TOKENS_COMPUTED.name),
        num_received=total(PROMPT_TOKENS_RECEIVED.name),
        num_handoffs=total(HANDOFFS.name, "received"),
        handoff_bytes=total(HANDOFF_BYTES.name),
        num_ended=total(SEQUENCES.name, "finished"),
    )


def minus(after: Counted, before: Counted) -> Counted:
    pairs = zip(msgspec.structs.astuple(after), msgspec.structs.astuple(before), strict=True)
    return Counted(*(mine - theirs for mine, theirs in pairs))


async def ask(server: Server, side: str, body: dict[str, object], num_choices: int, is_split: bool) -> Asked:
    before = counted(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client:
        sent_s = time.perf_counter()
        if side == TOGETHER:
            begun = await first_tokens(client, {**body, "n": num_choices})
        else:
            asked = (first_tokens(client, {**body, "seed": number}) for number in range(num_choices))
            begun = [moment for each in await asyncio.gather(*asked) for moment in each]
    if len(begun) != num_choices:
        raise SystemExit(f"{len(begun)} of {num_choices} answers began: these times would mean nothing")
    await wait_idle(server)
    found: list[Counted] = []

    def is_settled() -> bool:
        found.append(minus(counted(server), before))
        last = found[-1]  # on split workers each hand-off ends a sequence of its own
        return last.num_ended >= num_choices + (last.num_handoffs if is_split else 0)

    await asyncio.to_thread(wait_until, is_settled, TIMEOUT_S, "the counters of a round")
    return Asked(1e3 * (min(begun) - sent_s), 1e3 * (max(begun) - sent_s), found[-1])


async def measure(
    server: Server, name: str, prompts: Prompts, seed: int, shape: tuple[int, int, int]
) -> list[dict[str, Asked]]:
    num_rounds, num_choices, num_tokens = shape
    rng = random.Random(seed)
    rounds: list[dict[str, Asked]] = []
    for number in range(-1, num_rounds):  # the first is a warm-up
        sides = (TOGETHER, APART) if number % 2 else (APART, TOGETHER)
        asked = {}
        for side in sides:
            body = {**prompts.body(rng, num_tokens, ANSWER_TOKENS), "temperature": 0.8, "seed": 1}
            body.pop("stream_options", None)
            asked[side] = await ask(server, side, body, num_choices, name == "split")
        if number >= 0:
            rounds.append(asked)
    return rounds


def show(name: str, rounds: list[dict[str, Asked]]) -> dict[str, object]:
    print(f"{name}, median of {len(rounds)} rounds")
    for side in (TOGETHER, APART):
        each = [asked[side] for asked in rounds]
        first, last = (statistics.median(getattr(a, field) for a in each) for field in ("first_ms", "last_ms"))
        sums = [
            statistics.median(values)
            for values in zip(*(msgspec.structs.astuple(a.counted) for a in each), strict=True)
        ]
        print(
            f"  {side:12} first TTFT {first:7.1f} ms   last TTFT {last:7.1f} ms   read {sums[0]:.0f}   received "
            f"{sums[1]:.0f} in {sums[2]:.0f} hand-offs   handed over {sums[3] / 1e6:.1f} MB"
        )
    ratios = {
        field: statistics.median(getattr(a[TOGETHER], field) / getattr(a[APART], field) for a in rounds)
        for field in ("first_ms", "last_ms")
    }
    print(f"  {TOGETHER} / {APART}: first TTFT {ratios['first_ms']:.2f}, last TTFT {ratios['last_ms']:.2f}\n")
    return {"ratio": ratios, "rounds": [{s: msgspec.to_builtins(a) for s, a in asked.items()} for asked in rounds]}


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--choices", type=int, default=4, help="answers to one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 3)
    prompts = Prompts(args.model)
    print(heading(args), "interleaved")
    print(f"{args.choices} answers of {ANSWER_TOKENS} tokens to a prompt of {args.prompt_tokens}, sampled\n")
    shape = (args.rounds, args.choices, args.prompt_tokens)
    figures = {}
    for name, pools in SERVERS.items():
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serving(args.model, *pools))
            figures[name] = show(name, asyncio.run(measure(server, name, prompts, args.seed, shape)))
    report_json("choices", args, {"choices": args.choices, "prompt_tokens": args.prompt_tokens, **figures})


if __name__ == "__main__":
    main()
