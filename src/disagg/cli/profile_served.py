"""The work of `disagg profile --served`: steady loads on the model served here by two workers, seen from a client.

    lone prompts        split workers; one at a time, of several lengths           what HTTP and messages take
    streams             split workers; 1, 2, 4, 8 at once, prefill at rest         steps as they are served
    streams | prompts   split workers; 4 streams beside prompts one by one         decode beside a busy prefill
    prompts | streams   the same load, seen from the prompts                       prefill beside a busy decode
    two of a kind       mixed workers; 8 streams, 2 prompts at once: half on each  a worker beside its like

Rounds take turns, so that what disturbs the machine for a while hits each load once. Both clusters are up all the time,
one is asked. Medians over all rounds count.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.beside import BesideWork
from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, Target, measure
from disagg.bench.prompts import plain_ids
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, RandomWork, Workload
from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.serving import ServedGap, ServedPrompt, ServedTimes
from disagg.testing.processes import Serve
from disagg.worker.config import WorkerConfig

READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
PROMPTS = (48, 160, 448)  # tokens; each is read in one step
PROMPT = 160  # of those beside something
NUM_LONE = 3  # prompts of each length in a round
LONE_ANSWER = 4
STREAMS = (1, 2, 4, 8)
NUM_STREAMS = 4  # on one worker, of those beside something
STREAM_PROMPT = 32
ANSWER = 64
SHORT_ANSWER = 2  # of prompts that keep a prefill worker busy
NUM_PROMPTS = 6  # in a round, of those beside each other
PLENTY = 10_000
BOTH, STREAMS_TWICE, PROMPTS_TWICE = "streams and prompts", "streams beside streams", "prompts beside prompts"
NUM_WORKERS = 2  # of either kind
SPLIT, MIXED = "split", "mixed"
POOLS = {SPLIT: ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"), MIXED: ("--mixed", "2")}


class _Load(msgspec.Struct, frozen=True):
    key: str
    pools: str
    work: Workload


def measure_served(config: WorkerConfig, *, rounds: int, say: Callable[[str], None]) -> ServedTimes:
    """config: of every worker; without threads in it, cores are shared out.

    Raises ConfigurationError when an answer fails.
    """
    if rounds < 1:
        raise ConfigurationError(f"{rounds} rounds of served loads: at least 1 must be measured")
    ids = plain_ids(config.model)
    flags = _flags(config)
    with (
        Serve((config.model, *POOLS[SPLIT], *flags), ready_timeout_s=READY_TIMEOUT_S) as split,
        Serve((config.model, *POOLS[MIXED], *flags), ready_timeout_s=READY_TIMEOUT_S) as mixed,
    ):
        targets = {
            name: Target(url=server.url, api=Api.IDS, ids=ids, timeout_s=ANSWER_TIMEOUT_S)
            for name, server in ((SPLIT, split), (MIXED, mixed))
        }
        loads, seen = _loads(), Seen()
        for number in range(rounds + 1):  # the first touches memory and code paths that later ones find touched
            for place, load in enumerate(loads):
                records = _ask(targets[load.pools], load, seed=1 + len(loads) * number + place)
                if number:
                    seen.add(load.key, records)
            say(f"served, round {number} of {rounds} done")
    return seen.times()


def _flags(config: WorkerConfig) -> tuple[str, ...]:
    flags = [
        ("--device", config.device),
        ("--weights", config.weights.value),
        ("--kernels", config.kernels.value),
        ("--kv-dtype", config.kv_dtype.value),
        ("--block-size", str(config.block_size)),
    ]
    if config.num_threads is not None:
        flags.append(("--num-threads", str(config.num_threads)))
    if config.num_blocks is not None:
        flags.append(("--num-blocks", str(config.num_blocks)))
    else:
        flags.append(("--kv-memory", str(config.kv_memory_bytes)))
    return tuple(word for flag in flags for word in flag)


def _loop(num_clients: int, num_requests: int, prompt: int, answer: int) -> ClosedWork:
    work = RandomWork(
        num_requests=num_requests, arrivals=EvenArrivals(1.0), prompt=Lengths(prompt), output=Lengths(answer)
    )
    return ClosedWork(work, num_clients)


def _loads() -> list[_Load]:
    prompts = _loop(1, PLENTY, PROMPT, SHORT_ANSWER)
    streams = _loop(NUM_STREAMS, NUM_STREAMS, STREAM_PROMPT, ANSWER)
    return [
        *(_Load(f"lone {n}", SPLIT, _loop(1, NUM_LONE, n, LONE_ANSWER)) for n in PROMPTS),
        *(_Load(f"streams {n}", SPLIT, _loop(n, n, STREAM_PROMPT, ANSWER)) for n in STREAMS),
        _Load(BOTH, SPLIT, BesideWork(streams, prompts)),
        _Load(STREAMS_TWICE, MIXED, _loop(2 * NUM_STREAMS, 2 * NUM_STREAMS, STREAM_PROMPT, ANSWER)),
        _Load(PROMPTS_TWICE, MIXED, _loop(2, NUM_PROMPTS, PROMPT, SHORT_ANSWER)),
    ]


def _ask(target: Target, load: _Load, seed: int) -> list[RequestRecord]:
    records = measure(target, LoadPlan(workload=load.work, slo=Slo(), seed=seed, prompt_seed=seed)).records
    for record in records:
        if not record.is_whole:
            raise ConfigurationError(f"a request of {load.key!r} failed ({record.lapse}): {record.detail}")
    return list(records)


class Seen:
    """By load, what counts of its answers; of all rounds. Streams are told from prompts by their answers' length."""

    def __init__(self) -> None:
        self.gaps_s: dict[str, list[float]] = {}
        self.ttfts_s: dict[str, list[float]] = {}
        self.first_gaps_s: dict[str, list[float]] = {}

    def add(self, key: str, records: Sequence[RequestRecord]) -> None:
        """Of one round: only while all of its streams run, if there are any."""
        streams = [record for record in records if record.num_output_tokens == ANSWER]
        prompts = [record for record in records if record.num_output_tokens != ANSWER]
        begun_s = max((record.token_s[1] for record in streams), default=-math.inf)
        ended_s = min((record.token_s[-1] for record in streams), default=math.inf)
        self.gaps_s.setdefault(key, []).extend(
            after_s - before_s
            for record in streams
            for before_s, after_s in itertools.pairwise(record.token_s)
            if begun_s <= before_s and after_s <= ended_s
        )
        within = [record for record in prompts if begun_s <= record.due_s and record.token_s[0] <= ended_s]
        self.ttfts_s.setdefault(key, []).extend(record.ttft_s for record in within)
        gaps_s = (record.first_gap_s for record in within)
        self.first_gaps_s.setdefault(key, []).extend(gap_s for gap_s in gaps_s if gap_s is not None)

    def times(self) -> ServedTimes:
        """Raises ConfigurationError where a load showed nothing."""
        lone = [f"lone {n}" for n in PROMPTS]
        first_gaps_s = [gap_s for key in lone for gap_s in self.first_gaps_s[key]]
        return ServedTimes(
            prompts=tuple(ServedPrompt(n, _median(self.ttfts_s, key)) for n, key in zip(PROMPTS, lone, strict=True)),
            gaps=tuple(ServedGap(n, STREAM_PROMPT + ANSWER / 2, _median(self.gaps_s, f"streams {n}")) for n in STREAMS),
            first_gap_s=_median({"lone": first_gaps_s}, "lone"),
            prompt_tokens=PROMPT,
            ttft_beside_prompts_s=_median(self.ttfts_s, PROMPTS_TWICE),
            ttft_beside_streams_s=_median(self.ttfts_s, BOTH),
            num_streams=NUM_STREAMS,
            gap_beside_prompts_s=_median(self.gaps_s, BOTH),
            gap_beside_streams_s=_median(self.gaps_s, STREAMS_TWICE),
        )


def _median(found: dict[str, list[float]], key: str) -> float:
    if not found[key]:
        text = f"no answer of {key!r} counts: the streams did not run at once"
        raise ConfigurationError(f"{text}; profile on a quieter machine")
    return statistics.median(found[key])
