"""What tests of wrong output share: right answers, KV as it must lie somewhere, counters of a worker of either kind."""

import asyncio

from tests.unit.scheduler.rigs import handoff
from tests.unit.worker.rigs import DEADLINE_S, Site

from disagg.core.ids import BlockId, SequenceId
from disagg.core.request import SamplingParams
from disagg.core.spans import KvLayout
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens, kv_bytes
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_worker import VirtualWorker

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def check_answers(cluster: VirtualCluster) -> None:
    """Whoever has stayed has the answer of an undisturbed engine, whoever has left the beginning of it."""
    layout = next(iter(cluster.workers.values())).card.layout
    for request_id, answer in cluster.answers.items():
        spec = answer.request
        for choice, tokens in enumerate(answer.tokens):
            expected = expected_tokens(layout, SequenceId(request_id, choice), spec.prompt_ids, spec.sampling)
            is_short = answer.is_aborted or answer.error is not None
            assert tokens == (expected[: len(tokens)] if is_short else expected), cluster.time.story()


def counted(worker: VirtualWorker | Site, metric: table.Metric, label: str | None = None) -> float:
    """One label's total, or that of all."""
    scheduler = worker.scheduler if isinstance(worker, VirtualWorker) else worker.worker.scheduler
    return sum(n for name, each, n in scheduler.counters.items() if name == metric.name and label in (None, each))


KV = KvLayout(num_layers=2, num_kv_heads=32, head_dim=128, dtype="float32", block_size=16)  # 64 KiB a token


def blocks_of(decode: Site, number: int) -> tuple[BlockId, ...]:
    """Those that a sequence owns: reserved for its source, or its own."""
    sequence = decode.worker.scheduler._state.sequences.get(handoff(number))
    if sequence is None:
        return ()
    allocation = sequence.destination.allocation if sequence.destination is not None else None
    return allocation.blocks if allocation is not None else sequence.blocks


async def reserved(decode: Site, number: int) -> tuple[BlockId, ...]:
    """Its blocks, as soon as there are some. Looks at every turn of the loop: on a fast machine they are soon gone."""
    async with asyncio.timeout(DEADLINE_S):
        while not (blocks := blocks_of(decode, number)):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return blocks


def prompt_kv(layout: KvLayout, prompt: tuple[int, ...]) -> bytes:
    """In wire order."""
    return b"".join(
        kv_bytes(layout, token, position, layer, kv)
        for layer in range(layout.num_layers)
        for kv in range(layout.num_planes)
        for position, token in enumerate(prompt)
    )


def check_only_between_rounds(cluster: VirtualCluster) -> None:
    """Checking all rules after each of a hundred thousand events takes longer than the events."""
    for each in cluster.workers.values():
        each.scheduler.check_invariants = lambda: None  # type: ignore[method-assign]
    cluster.dispatcher.check_invariants = lambda: None  # type: ignore[method-assign]
