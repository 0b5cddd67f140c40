"""Seeded schedules of a whole cluster in virtual time: right answers, nothing lost, nothing left behind."""

import os
import random
from functools import partial

import pytest

from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role
from disagg.dispatch.stream import GenerateRequest
from disagg.testing.engine import expected_tokens
from disagg.testing.virtual import MODEL, Answer, VirtualCluster
from disagg.testing.virtual_time import Chances
from disagg.testing.virtual_worker import VirtualWorker

NUM_SCHEDULES = int(os.environ.get("DISAGG_SCHEDULES", "30"))


def draw_request(rng: random.Random) -> GenerateRequest:
    """Half of the prompts share one of three prefixes."""
    prefix = [1000 - 1 - rng.randrange(3)] * rng.choice([0, 8, 13, 32])
    prompt = tuple(prefix + [rng.randrange(900) for _ in range(rng.randint(1, 60))])
    return GenerateRequest(
        MODEL,
        prompt,
        SamplingParams(
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            stop_token_ids=tuple(range(rng.choice([0, 0, 100]))),
            grammar=rng.choice([None, None, GrammarSpec(GrammarKind.LARK, "mod 7")]),
        ),
        num_choices=rng.choice([1, 1, 1, 2]),
    )


def check_answer(cluster: VirtualCluster, request_id: RequestId, answer: Answer) -> None:
    """Every token that was delivered is the one that an undisturbed engine gives."""
    layout = next(iter(cluster.workers.values())).card.layout
    for choice, tokens in enumerate(answer.tokens):
        expected = expected_tokens(
            layout, SequenceId(request_id, choice), answer.request.prompt_ids, answer.request.sampling
        )
        if answer.error is None and not answer.is_aborted:
            assert tokens == expected, (request_id, cluster.time.story())
        else:
            assert tokens == expected[: len(tokens)], (request_id, cluster.time.story())


def start(cluster: VirtualCluster, rng: random.Random) -> None:
    mode = rng.choice(list(HandoffMode))
    for index in range(rng.randint(1, 2)):
        cluster.start_worker(
            f"prefill-{index}", Role.PREFILL, mode=mode, num_blocks=rng.choice([30, 64]), block_size=rng.choice([4, 8])
        )
        cluster.start_worker(f"decode-{index}", Role.DECODE, num_blocks=rng.choice([30, 64]))
    if rng.random() < 0.3:
        cluster.start_worker("mixed-0", Role.MIXED)
    cluster.time.run(until=lambda: cluster.is_ready)


@pytest.mark.parametrize("seed", range(25))
def test_undisturbed(seed: int) -> None:
    """No fault, no abort: every request ends with exactly the expected tokens."""
    rng = random.Random(seed)
    cluster = VirtualCluster(seed, local_prefill_tokens=rng.choice([0, 20, 1000]))
    start(cluster, rng)
    for _ in range(25):
        request = draw_request(rng)
        cluster.time.after(rng.uniform(0, 2), partial(cluster.submit, request))
    cluster.time.run(until=lambda: len(cluster.answers) == 25 and cluster.are_all_over)
    for request_id, answer in cluster.answers.items():
        assert answer.error is None
        check_answer(cluster, request_id, answer)
    cluster.check_nothing_left()


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_any_fault_leaves_every_answer_whole(seed: int) -> None:
    """Clients leave, bytes arrive wrong, workers die, hang, drain, lose touch: whoever stays gets the same tokens."""
    rng = random.Random(10_000 + seed)
    cluster = VirtualCluster(seed, local_prefill_tokens=rng.choice([0, 0, 30]), chances=Chances(corrupt=0.03))
    start(cluster, rng)
    for _ in range(30):
        cluster.time.after(rng.uniform(0, 3), partial(submit_and_perhaps_abort, cluster, rng))
    for _ in range(rng.randint(1, 5)):
        fault = rng.choice([kill_and_restart, kill_and_restart, hang, cut, drain_and_restart])
        cluster.time.after(rng.uniform(0, 3), partial(fault, cluster, rng))
    cluster.time.run_for(4.0)
    cluster.time.run(until=lambda: cluster.are_all_over)
    for request_id, answer in cluster.answers.items():
        assert answer.error is None, (request_id, answer.error, cluster.time.story())
        check_answer(cluster, request_id, answer)
    cluster.check_nothing_left()


def check_disturbed(cluster: VirtualCluster, rng: random.Random, name: str) -> None:
    """20 requests while workers die, hang, drain and lose touch: every answer is whole, and nothing is left."""
    for _ in range(20):
        cluster.time.after(rng.uniform(0, 3), partial(submit_and_perhaps_abort, cluster, rng))
    for _ in range(rng.randint(1, 5)):
        fault = rng.choice([kill_and_restart, hang, cut, drain_and_restart])
        cluster.time.after(rng.uniform(0, 3), partial(fault, cluster, rng))
    cluster.time.run_for(4.0)
    cluster.time.run(until=lambda: cluster.are_all_over)
    for request_id, answer in cluster.answers.items():
        assert answer.error is None, f"{name}: {answer.error}\n{cluster.time.story()}"
        check_answer(cluster, request_id, answer)
    cluster.check_nothing_left()


def submit_and_perhaps_abort(cluster: VirtualCluster, rng: random.Random) -> None:
    request_id = cluster.submit(draw_request(rng))

    def abort() -> None:
        if not cluster.answers[request_id].is_over:
            cluster.abort(request_id)

    if rng.random() < 0.3:
        cluster.time.after(rng.uniform(0, 0.5), abort)


def pick(cluster: VirtualCluster, rng: random.Random) -> str | None:
    names = sorted(name for name, worker in cluster.workers.items() if not worker.is_paused)
    return rng.choice(names) if names else None


def restart(cluster: VirtualCluster, name: str, worker: VirtualWorker) -> None:
    card, config = worker.card, worker.scheduler.config
    cluster.start_worker(name, card.role, num_blocks=card.num_blocks, layout=card.layout, mode=config.handoff_mode)


def kill_and_restart(cluster: VirtualCluster, rng: random.Random) -> None:
    name = pick(cluster, rng)
    if name is not None:
        worker = cluster.workers[WorkerId(name)]
        cluster.kill(name)
        cluster.time.after(rng.uniform(0.05, 0.5), partial(restart, cluster, name, worker))


def hang(cluster: VirtualCluster, rng: random.Random) -> None:
    name = pick(cluster, rng)
    if name is not None:
        is_noticed = rng.random() < 0.7
        cluster.pause(name, rng.uniform(0.3, 1.0) if is_noticed else rng.uniform(0.01, 0.3), is_noticed=is_noticed)


def cut(cluster: VirtualCluster, rng: random.Random) -> None:
    cluster.cut(rng.choice(["prefill-0", "prefill-1"]), rng.choice(["decode-0", "decode-1"]))


def drain_and_restart(cluster: VirtualCluster, rng: random.Random) -> None:
    name = pick(cluster, rng)
    if name is None:
        return
    worker = cluster.workers[WorkerId(name)]
    cluster.drain(name)

    def end_when_idle() -> None:
        if cluster.workers.get(WorkerId(name)) is not worker:
            return
        if worker.scheduler.is_draining and worker.scheduler.is_idle:
            cluster.kill(name)
            cluster.time.after(0.1, partial(restart, cluster, name, worker))
        else:
            cluster.time.after(0.05, end_when_idle)

    cluster.time.after(0.05, end_when_idle)
