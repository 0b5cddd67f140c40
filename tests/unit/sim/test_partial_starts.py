"""What a first step that begins early gains over a slow link, and what other streams notice: `pytest -s` prints it.

Step times like those of a small model on one core, a link of 100 Mbit/s; nothing is left to chance.
"""

import random

import pytest
from tests.unit.sim.rigs import LinearSteps, scenario, worker

from disagg.bench.workload import Run, WorkRequest
from disagg.core.roles import PartialStart, Role
from disagg.policy.partial_start import MAX_SHARE
from disagg.sim.records import RequestRecord
from disagg.sim.scenario import Fidelity, Link
from disagg.sim.simulate import simulate

STEPS = LinearSteps(num_layers=30, kv_bytes_per_token=46_080, base_s=0.022, prompt_token_s=2e-3, stream_s=1e-3)
LINK = Link(bandwidth_bytes_s=12.5e6, latency_s=1e-4)
STEP_S = 0.023  # of one stream
NUM_OTHERS = 4


class Listed:
    """A workload and its stream: these requests."""

    def __init__(self, requests: list[WorkRequest]) -> None:
        self._requests = requests
        self._left: list[WorkRequest] = []

    def start(self, rng: random.Random) -> "Listed":
        self._left = list(self._requests)
        return self

    def next_request(self) -> WorkRequest | None:
        return self._left.pop(0) if self._left else None

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        return None


def run(choice: PartialStart, num_others: int) -> tuple[RequestRecord, list[RequestRecord]]:
    """A prompt of 512 tokens, handed over; others that are read where they are written, and write all the time."""
    others = [WorkRequest(number, 0.0, (Run(10 + number, 1),), 300) for number in range(num_others)]
    handed_over = WorkRequest(num_others, 1.0, (Run(99, 512),), 8)
    workers = tuple(
        worker(name, role, steps=STEPS, nic=LINK, min_push_bytes=2 << 20, partial_start=choice)
        for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
    )
    made = simulate(scenario(workers, Listed([*others, handed_over]), Fidelity.SMALL), 0)
    *records, last = sorted(made.records, key=lambda record: record.number)
    assert {record.path for record in records} <= {"local"}
    assert last.path == "remote"
    return last, records


def test_alone_it_gains_all_of_a_step_but_its_last_layers() -> None:
    """10 pushes of 3 layers: the last push is waited for either way."""
    (off, _), (auto, _) = run(PartialStart.OFF, 0), run(PartialStart.AUTO, 0)
    gained_s = off.first_gap_s - auto.first_gap_s
    print(
        f"\nalone: first gap {1e3 * off.first_gap_s:.1f} -> {1e3 * auto.first_gap_s:.1f} ms, a step {1e3 * STEP_S:.0f}"
    )
    assert gained_s == pytest.approx(STEP_S * 27 / 30, rel=0.01)


def test_beside_others_it_gains_too_and_no_gap_of_theirs_grows_by_more_than_a_part() -> None:
    (off, other_off), (auto, other_auto) = run(PartialStart.OFF, NUM_OTHERS), run(PartialStart.AUTO, NUM_OTHERS)
    means = [sum(record.tpot_s for record in records) / NUM_OTHERS for records in (other_off, other_auto)]
    longest = [max(record.max_itl_s for record in records) for records in (other_off, other_auto)]
    gaps = f"{1e3 * off.first_gap_s:.1f} -> {1e3 * auto.first_gap_s:.1f} ms"
    theirs = "TPOT {:.2f} -> {:.2f}, longest gap {:.1f} -> {:.1f}".format(*(1e3 * each for each in means + longest))
    print(f"\nbeside {NUM_OTHERS}: first gap {gaps}; of the others {theirs}")
    assert auto.first_gap_s < off.first_gap_s
    assert longest[1] <= longest[0] + MAX_SHARE * STEP_S
    assert means[1] < 1.01 * means[0]
