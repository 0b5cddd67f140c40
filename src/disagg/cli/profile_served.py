"""The work of `disagg profile --served`: steady loads on the model served here by two workers, seen from a client.

    lone prompts        split workers; one at a time, of several lengths           steps that read, what HTTP takes
    streams             split workers; 1, 2, 4, 8 at once, prefill at rest         steps as they are served
    streams | prompts   split workers; 4 streams, and long prompts now and then    decode beside a busy prefill
    prompts | streams   split workers; prompts, and a stream now and then          prefill beside a busy decode
    two of a kind       mixed workers; each loop has one of them to itself         a worker beside its like

What a neighbour costs is the difference between its turns and its pauses, a second or two apart in one load: from one
load to the next a machine that is shared with others may be another one. Rounds take turns, so that what disturbs the
machine for a while hits each load once. Both clusters are up all the time, one is asked. Medians over all rounds count.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.beside import BesideWork, Stretch, in_turns, is_neighbour
from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, Target, measure
from disagg.bench.prompts import plain_ids
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, RandomWork, Workload
from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.serving import ServedGap, ServedPrompt, ServedTimes, ServedTurns
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part, RequestTimeline
from disagg.testing.processes import Serve
from disagg.worker.config import WorkerConfig

READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
PROMPTS = (48, 160, 448)  # tokens; each is read in one step
PROMPT, LONG_PROMPT = 160, 448  # of those beside something, and of those that keep a neighbour busy for a while
NUM_LONE = 3  # prompts of each length in a round
LONE_ANSWER = 4
STREAMS = (1, 2, 4, 8)
NUM_STREAMS = 4  # on one worker, beside prompts
STREAM_PROMPT = 32
ANSWER = 64
NEIGHBOUR_ANSWER = 48  # of a stream that comes and goes: several of PROMPT are read meanwhile
SHORT_ANSWER = 2  # of prompts that keep a prefill worker busy
NUM_PROMPTS = 16  # in a round, of those beside something
PAUSE_S = 2.5  # of a neighbour: as well
PLENTY = 10_000
STREAMS_BY_PROMPTS, PROMPTS_BY_STREAMS = "streams beside prompts", "prompts beside streams"
STREAMS_TWICE, PROMPTS_TWICE = "streams beside streams", "prompts beside prompts"
TURNS = (STREAMS_BY_PROMPTS, PROMPTS_BY_STREAMS, STREAMS_TWICE, PROMPTS_TWICE)
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
                records, timelines = _ask(targets[load.pools], load, seed=1 + len(loads) * number + place)
                if number:
                    seen.add(load.key, records, timelines)
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


def _loop(num_clients: int, num_requests: int, prompt: int, answer: int, think_s: float = 0.0) -> ClosedWork:
    work = RandomWork(
        num_requests=num_requests, arrivals=EvenArrivals(1.0), prompt=Lengths(prompt), output=Lengths(answer)
    )
    return ClosedWork(work, num_clients, think_s)


def _loads() -> list[_Load]:
    prompts = _loop(1, NUM_PROMPTS, PROMPT, SHORT_ANSWER)
    busy_prompts = _loop(1, PLENTY, LONG_PROMPT, SHORT_ANSWER, PAUSE_S)
    busy_stream = _loop(1, PLENTY, STREAM_PROMPT, NEIGHBOUR_ANSWER, PAUSE_S)
    return [
        *(_Load(f"lone {n}", SPLIT, _loop(1, NUM_LONE, n, LONE_ANSWER)) for n in PROMPTS),
        *(_Load(f"streams {n}", SPLIT, _loop(n, n, STREAM_PROMPT, ANSWER)) for n in STREAMS),
        _Load(
            STREAMS_BY_PROMPTS,
            SPLIT,
            BesideWork(_loop(NUM_STREAMS, NUM_STREAMS, STREAM_PROMPT, ANSWER), busy_prompts),
        ),
        _Load(PROMPTS_BY_STREAMS, SPLIT, BesideWork(prompts, busy_stream)),
        _Load(STREAMS_TWICE, MIXED, BesideWork(_loop(1, 1, STREAM_PROMPT, ANSWER), busy_stream)),
        _Load(PROMPTS_TWICE, MIXED, BesideWork(prompts, busy_prompts)),
    ]


def _ask(target: Target, load: _Load, seed: int) -> tuple[list[RequestRecord], Sequence[RequestTimeline]]:
    result = measure(target, LoadPlan(workload=load.work, slo=Slo(), seed=seed, prompt_seed=seed))
    for record in result.records:
        if not record.is_whole:
            raise ConfigurationError(f"a request of {load.key!r} failed ({record.lapse}): {record.detail}")
    return list(result.records), result.observation.timelines


class Seen:
    """By load, what counts of its answers; of all rounds. Streams are told from prompts by their answers' length."""

    def __init__(self) -> None:
        self.gaps_s: dict[str, list[float]] = {}
        self.ttfts_s: dict[str, list[float]] = {}
        self.steps_s: dict[str, list[float]] = {}  # that read a lone prompt
        self.handoffs_s: list[float] = []  # of a lone answer's first gap, what is not its step
        self.turns: dict[str, list[ServedTurns]] = {key: [] for key in TURNS}

    def add(self, key: str, records: Sequence[RequestRecord], timelines: Sequence[RequestTimeline]) -> None:
        """Of one round."""
        if key in self.turns:
            self._add_turns(key, records)
            return
        self.gaps_s.setdefault(key, []).extend(end_s - begin_s for begin_s, end_s in _gaps(records))
        prompts = [record for record in records if record.num_output_tokens != ANSWER]
        self.ttfts_s.setdefault(key, []).extend(record.ttft_s for record in prompts)
        for choice in (choice for timeline in timelines for choice in timeline.choices) if prompts else ():
            self.steps_s.setdefault(key, []).append(choice.seconds(Part.TTFT, Stage.PREFILL))
            if choice.first_gap_s is not None:
                self.handoffs_s.append(choice.first_gap_s - choice.seconds(Part.FIRST_GAP, Stage.FIRST_STEP))

    def _add_turns(self, key: str, records: Sequence[RequestRecord]) -> None:
        own = [record for record in records if not is_neighbour(record.number)]
        neighbour = [record for record in records if is_neighbour(record.number)]
        has_streams = key in (STREAMS_BY_PROMPTS, STREAMS_TWICE)
        spans = _gaps(own) if has_streams else [(record.sent_s, record.token_s[0]) for record in own]
        busy = [
            (record.token_s[0], record.token_s[-1])
            if record.num_output_tokens == NEIGHBOUR_ANSWER
            else (record.sent_s, record.token_s[0])
            for record in neighbour
        ]
        found = in_turns(spans, busy, [(record.sent_s, record.end_s) for record in neighbour])
        if found.alone_s and found.beside_s:
            self.turns[key].append(ServedTurns(statistics.median(found.alone_s), statistics.median(found.beside_s)))

    def times(self) -> ServedTimes:
        """Raises ConfigurationError where a load showed nothing."""
        lone = [(n, f"lone {n}") for n in PROMPTS]
        for key, turns in self.turns.items():
            if not turns:
                text = f"nothing of {key!r} was seen both in the neighbour's turns and in its pauses"
                raise ConfigurationError(f"{text}; profile on a quieter machine")
        return ServedTimes(
            prompts=tuple(ServedPrompt(n, _median(self.ttfts_s, key), _median(self.steps_s, key)) for n, key in lone),
            gaps=tuple(ServedGap(n, STREAM_PROMPT + ANSWER / 2, _median(self.gaps_s, f"streams {n}")) for n in STREAMS),
            handoff_s=_median({"lone": self.handoffs_s}, "lone"),
            prompts_beside_prompts=tuple(self.turns[PROMPTS_TWICE]),
            prompts_beside_streams=tuple(self.turns[PROMPTS_BY_STREAMS]),
            streams_beside_prompts=tuple(self.turns[STREAMS_BY_PROMPTS]),
            streams_beside_streams=tuple(self.turns[STREAMS_TWICE]),
        )


def _gaps(records: Sequence[RequestRecord]) -> list[Stretch]:
    """Between tokens of the streams among these, after the first gap of each, while all of them run."""
    streams = [record for record in records if record.num_output_tokens == ANSWER]
    begun_s = max((record.token_s[1] for record in streams), default=-math.inf)
    ended_s = min((record.token_s[-1] for record in streams), default=math.inf)
    return [
        (before_s, after_s)
        for record in streams
        for before_s, after_s in itertools.pairwise(record.token_s)
        if begun_s <= before_s and after_s <= ended_s
    ]


def _median(found: dict[str, list[float]], key: str) -> float:
    if not found.get(key):
        text = f"no answer of {key!r} counts: the streams did not run at once, or the server kept no timelines"
        raise ConfigurationError(f"{text}; profile on a quieter machine")
    return statistics.median(found[key])
