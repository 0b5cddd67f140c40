"""What tests of leaks share: scenes in virtual time, stopped at every moment, and one check of what must be back."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.faults.outputs import check_answers
from tests.unit.scheduler.rigs import Solo

from disagg.core.ids import RequestId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role
from disagg.dispatch.stream import GenerateRequest
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_time import Timing
from disagg.testing.virtual_worker import VirtualWorker

PROMPT = tuple(range(10))
# No block may owe its return to a lease: where this is set, a lease would come far too late.
ENDLESS_S = 10_000.0
SLOW_LINK = Timing(write_s=0.02, byte_s=1e-5)
SLOWER_LINK = Timing(step_s=0.05, byte_s=3e-4)  # what is missing takes longer than a step is thought to


def num_used(worker: VirtualWorker) -> int:
    state = worker.scheduler.snapshot()
    return state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks


def check_clean(worker: VirtualWorker) -> None:
    """Nothing of anybody is left on this worker now."""
    assert (num_used(worker), worker.scheduler.is_idle, worker.grants) == (0, True, {}), worker.scheduler.snapshot()


def check_solo_clean(solo: Solo) -> None:
    assert (solo.num_used, solo.scheduler.is_idle) == (0, True), solo.state


class Scene(NamedTuple):
    """A ready cluster with requests under way; the first one is the one that something happens to."""

    cluster: VirtualCluster
    victim: RequestId

    @property
    def worker(self) -> dict[str, VirtualWorker]:
        return {str(name): worker for name, worker in self.cluster.workers.items()}

    def check_answers(self) -> None:
        """Whoever has stayed gets what an undisturbed engine says."""
        check_answers(self.cluster)


def request(length: int, max_tokens: int = 4, *, start: int = 0, num_choices: int = 1) -> GenerateRequest:
    prompt = tuple(range(start, start + length))
    return GenerateRequest(MODEL, prompt, SamplingParams(max_tokens, temperature=0.0), num_choices)


def scene(
    seed: int,
    *requests: GenerateRequest,
    num_decode: int = 1,
    num_prefill: int = 1,
    timing: Timing | None = None,
    mode: HandoffMode = HandoffMode.LAYERWISE,
    lease_s: float = ENDLESS_S,
    decode_blocks: int = 64,
) -> Scene:
    cluster = VirtualCluster(seed, timing=timing)
    for index in range(num_prefill):
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, mode=mode, lease_s=lease_s, chunk_tokens=8)
    for index in range(num_decode):
        cluster.start_worker(
            f"decode-{index}", Role.DECODE, lease_s=lease_s, num_blocks=decode_blocks, answer_headroom=1, block_size=4
        )
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.time.run_for(0.1)  # every pair has met
    ids = [cluster.submit(each) for each in requests or (request(20),)]
    return Scene(cluster, ids[0])


def run_events(cluster: VirtualCluster, count: int) -> None:
    """Let exactly so many things happen."""
    passed = itertools.count()
    cluster.time.run(until=lambda: next(passed) >= count)


def every_moment(make: Callable[[], Scene], stride: int = 1, limit: int = 10_000) -> Iterator[tuple[int, Scene]]:
    """The same scene, stopped before its first event, after it, after the second, ... at most `limit`."""
    undisturbed = make()
    count = itertools.count()
    undisturbed.cluster.time.run(until=lambda: next(count) >= 0 and undisturbed.cluster.are_all_over)
    num_events = next(count)
    assert num_events > 40, "too little happens to prove anything"
    for moment in range(0, min(num_events, limit), stride):
        made = make()
        run_events(made.cluster, moment)
        yield moment, made
