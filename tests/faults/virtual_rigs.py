"""What the fault classes share in virtual time: a cluster that notes when things happened, questions, right answers."""

import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from disagg.core.ids import HandoffId, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role
from disagg.dispatch.actions import Deliver
from disagg.dispatch.stream import GenerateRequest, TokensDelivered
from disagg.protocol.messages import ReportFailure, WorkerToRouter
from disagg.scheduler.sequence import Sequence
from disagg.telemetry.metrics import Metric
from disagg.testing.engine import expected_tokens
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_worker import VirtualWorker

# Seeds per test, as a multiple of what each test takes by itself.
TIMES = max(1, int(os.environ.get("DISAGG_SCHEDULES", "60")) // 60)


class WatchedCluster(VirtualCluster):
    """Notes every failure that a worker reported and every delivery, with its time."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.rng = random.Random(seed)
        self.failures: list[tuple[float, WorkerId, ReportFailure]] = []
        self.deliveries: dict[SequenceId, list[tuple[float, int]]] = {}  # (time, tokens)

    def from_worker(self, worker: VirtualWorker, message: WorkerToRouter) -> None:
        if isinstance(message, ReportFailure):
            self.failures.append((self.time.now_s, worker.worker_id, message))
            self.on_failure(worker, message)
        super().from_worker(worker, message)

    def on_failure(self, worker: VirtualWorker, message: ReportFailure) -> None:
        """For tests that look at what follows from it."""

    def _to_client(self, action: Deliver) -> None:
        event = action.event
        if isinstance(event, TokensDelivered):
            times = self.deliveries.setdefault(SequenceId(action.request_id, event.choice), [])
            times.append((self.time.now_s, len(event.tokens)))
        super()._to_client(action)

    def start(self, num_prefill: int, num_decode: int, **options: Any) -> None:
        """That many workers, and until the first two can be used; options are those of start_worker."""
        for index in range(num_prefill):
            self.start_worker(f"p{index}", Role.PREFILL, **options)
        for index in range(num_decode):
            self.start_worker(f"d{index}", Role.DECODE, **options)
        self.time.run(until=lambda: self.num_pairs == num_prefill * num_decode)

    @property
    def num_pairs(self) -> int:
        return sum(len(record.partners) for record in self.dispatcher.registry.records())

    def restart(self, name: str) -> None:
        """A killed worker's successor, under the same name at the same address."""
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        self.start_worker(name, role)

    def worker(self, name: str) -> VirtualWorker:
        return self.workers[WorkerId(name)]

    def total(self, metric: Metric, names: str = "", label: str | None = None) -> float:
        """Over the workers whose names begin so, and over all labels unless one is given."""
        workers = [worker for name, worker in self.workers.items() if name.startswith(names)]
        items = (item for worker in workers for item in worker.scheduler.counters.items())
        return sum(total for name, own, total in items if name == metric.name and label in (None, own))

    def largest_gap_s(self, request_id: RequestId) -> float:
        """Between two deliveries of one choice."""
        times = [
            [when_s for when_s, _ in found]
            for sequence_id, found in self.deliveries.items()
            if sequence_id.request_id == request_id
        ]
        return max((b - a for found in times for a, b in itertools.pairwise(found)), default=0.0)


def attempt(worker: VirtualWorker, sequence_id: SequenceId, number: int) -> Sequence | None:
    """What a worker still has of one attempt."""
    return worker.scheduler._state.sequences.get(HandoffId(sequence_id, number))


def attempts(worker: VirtualWorker) -> list[Sequence]:
    return list(worker.scheduler._state.sequences.values())


def ask(
    num_prompt: int, max_tokens: int = 6, *, salt: int = 0, temperature: float = 0.0, **more: Any
) -> GenerateRequest:
    """Prompts of different salts share no block."""
    prompt = tuple((17 * salt + 31 * index + salt * index) % 1000 for index in range(num_prompt))
    return GenerateRequest(MODEL, prompt, SamplingParams(max_tokens, temperature=temperature, seed=salt), **more)


def questions(rng: random.Random, count: int) -> Iterator[GenerateRequest]:
    """Of every length, greedy and sampled; half of them share one of three beginnings."""
    for _ in range(count):
        prefix = [999 - rng.randrange(3)] * rng.choice([0, 8, 13, 32])
        prompt = tuple(prefix + [rng.randrange(900) for _ in range(rng.randint(1, 60))])
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 12), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(2**32)
        )
        yield GenerateRequest(MODEL, prompt, sampling, num_choices=rng.choice([1, 1, 2]))


def submit_over(cluster: WatchedCluster, count: int, seconds: float) -> None:
    """That many questions, spread over so long from now."""
    for question in questions(cluster.rng, count):
        cluster.time.after(cluster.rng.uniform(0, seconds), partial(cluster.submit, question))


def finish(cluster: VirtualCluster, count: int, limit_s: float = 1000.0) -> None:
    """Run until that many requests are answered; every answer is whole and right, and nothing is left."""
    cluster.time.run(until=lambda: len(cluster.answers) == count and cluster.are_all_over, limit_s=limit_s)
    check_answers(cluster)
    cluster.check_nothing_left()


def check_answers(cluster: VirtualCluster) -> None:
    """Every answer that nobody left is the undisturbed engine's."""
    layout = next(iter(cluster.workers.values())).card.layout
    for request_id, answer in cluster.answers.items():
        assert answer.error is None, (request_id, answer.error, cluster.time.story())
        prompt, sampling = answer.request.prompt_ids, answer.request.sampling
        for choice, tokens in enumerate(answer.tokens):
            expected = expected_tokens(layout, SequenceId(request_id, choice), prompt, sampling)
            wanted = expected[: len(tokens)] if answer.is_aborted else expected
            assert tokens == wanted, (request_id, choice, cluster.time.story())


def any_mode(rng: random.Random) -> HandoffMode:
    return rng.choice(list(HandoffMode))
