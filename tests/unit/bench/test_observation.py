"""What a server says of its workers becomes shares of their time."""

import math

import pytest

from disagg.bench.observation import WANTED, Observation, joined, read_observation
from disagg.telemetry.exposition import Sample, exposition
from disagg.telemetry.metrics import HANDOFF_BYTES, PUSHES, SEQUENCES_WAITING, STEP_SECONDS
from disagg.telemetry.reading import cut


def answer(prefill_s: float, decode_s: float, hidden: int, waiting: int) -> bytes:
    """As /metrics of a router puts it."""
    labels = {
        "prefill": 'worker="prefill-0",role="prefill",model="m"',
        "decode": 'worker="decode-0",role="decode",model="m"',
    }
    return exposition(
        [
            (
                STEP_SECONDS,
                [
                    Sample(f'{labels["prefill"]},kind="prefill"', prefill_s),
                    Sample(f'{labels["decode"]},kind="decode"', decode_s / 2),
                    Sample(f'{labels["decode"]},kind="both"', decode_s / 2),
                ],
            ),
            (PUSHES, [Sample(labels["prefill"], 3)]),
            (SEQUENCES_WAITING, [Sample(labels["prefill"], waiting), Sample(labels["decode"], 0)]),
            (
                HANDOFF_BYTES,
                [
                    Sample(f'{labels["prefill"]},visibility="hidden"', hidden),
                    Sample(f'{labels["prefill"]},visibility="visible"', 10),
                ],
            ),
        ]
    )


def test_steps_become_shares_of_time_and_bytes_those_of_the_load_alone() -> None:
    found = read_observation([(0.0, answer(5, 1, 100, 0)), (2.0, answer(6, 3, 100, 4)), (4.0, answer(6, 5, 400, 2))])
    assert found.busy_by_role() == {"prefill": pytest.approx(0.25), "decode": pytest.approx(1.0)}
    assert [round(share, 6) for _, share in found.busy()["prefill-0"]] == [0.5, 0.25]
    assert found.waiting_by_role() == {"prefill": 2.0, "decode": 0.0}
    assert found.moved.bytes_by_visibility == {"hidden": 300.0, "visible": 0.0}
    assert found.moved.hidden_share == 1.0


def test_what_is_kept_of_an_answer_says_the_same() -> None:
    whole = answer(5, 1, 100, 3)
    kept = cut(whole, WANTED)
    assert b"disagg_pushes" not in kept
    assert read_observation([(1.0, kept)]) == read_observation([(1.0, whole)])
    assert cut(b"# HELP vllm:num_requests_running Of others.\nvllm:num_requests_running 1.0\n", WANTED) == b""


def test_work_for_other_loads_between_two_rounds_is_nobodys() -> None:
    rounds = [
        [(-0.1, answer(5, 1, 100, 0)), (9.9, answer(10, 1, 150, 0))],
        [(-0.1, answer(50, 9, 900, 0)), (9.9, answer(52, 9, 910, 0))],  # 40 s of steps and 750 bytes in between
    ]
    both = joined([(offset_s, read_observation(each)) for offset_s, each in zip((0.0, 10.0), rounds, strict=True)])
    assert both.busy_by_role() == {"prefill": pytest.approx(7 / 20), "decode": 0.0}
    assert both.moved.bytes_by_visibility == {"hidden": 60.0, "visible": 0.0}
    assert [sample.at_s for sample in both.samples if sample.role == "decode"] == [-0.1, 9.9, 9.9, 19.9]
    assert max(share for points in both.busy().values() for _, share in points) < 0.6


def test_a_worker_that_was_started_again_has_no_share_below_none() -> None:
    found = read_observation([(0.0, answer(5, 1, 0, 0)), (1.0, answer(0, 1, 0, 0))])
    assert found.busy()["prefill-0"] == ((1.0, 0.0),)
    assert found.busy_by_role()["prefill"] == 0.0


def test_a_server_without_such_metrics_says_nothing() -> None:
    assert read_observation([]) == Observation()
    assert Observation().busy_by_role() == {}
    assert math.isnan(Observation().moved.hidden_share)
