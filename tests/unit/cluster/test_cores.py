"""Cores are shared out evenly or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cluster.cores import CoreShare, split_cores


def test_each_worker_gets_cores_of_its_own_when_there_are_enough() -> None:
    assert split_cores(2, [0, 1, 4, 5]) == (CoreShare((0, 1), 2), CoreShare((4, 5), 2))


def test_what_does_not_divide_is_left_free() -> None:
    assert split_cores(2, range(5)) == (CoreShare((0, 1), 2), CoreShare((2, 3), 2))


def test_nobody_is_pinned_when_there_are_too_few() -> None:
    assert split_cores(3, [0, 1]) == (CoreShare((), 1),) * 3


@pytest.mark.parametrize("count", [0, -1])
def test_no_workers_no_shares(count: int) -> None:
    assert split_cores(count, [0, 1]) == ()


@given(num_workers=st.integers(1, 50), cores=st.sets(st.integers(0, 300), min_size=1, max_size=100))
def test_shares_never_overlap_and_are_all_alike(num_workers: int, cores: set[int]) -> None:
    shares = split_cores(num_workers, sorted(cores))
    used = [core for share in shares for core in share.cores]
    assert len(used) == len(set(used))
    assert set(used) <= cores
    assert {share.num_threads for share in shares} == {max(1, len(cores) // num_workers)}


def test_the_kernel_is_asked_by_default() -> None:
    assert split_cores(1)[0].num_threads >= 1
