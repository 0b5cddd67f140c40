"""What a watch over a core says of one while beside another."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def script(load_script: Callable[[str], Any]) -> Any:
    return load_script("machine_watch")


def test_paces_are_beside_the_usual_and_forget_what_was_interrupted(script: Any) -> None:
    seconds = [1.0, 1.0, 9.0, 1.0, 2.0, 2.0, 2.0]
    watched = script.Watched([script.Moment(100.0 + at, 1e-3 * each, 4e-3) for at, each in enumerate(seconds)])
    usual = watched.level(99.0, 103.5)
    assert (usual.compute_s, usual.memory_s) == (1e-3, 4e-3)
    paces = list(watched.paces(100.2, 106.0, usual))
    assert [pace.at_s for pace in paces] == pytest.approx([0.0, 0.3, 1.3, 2.3, 3.3, 4.3, 5.3])
    assert [pace.prompts for pace in paces] == pytest.approx([1, 1, 1, 2, 2, 2, 2])
    assert {pace.streams for pace in paces} == {1.0}


def test_a_while_without_a_moment_is_like_all(script: Any) -> None:
    watched = script.Watched([script.Moment(1.0, 2.0, 4.0)])
    assert watched.level(7.0, 8.0) == script.Moment(7.0, 2.0, 4.0)


def test_cores_are_watched_while_it_runs(script: Any) -> None:
    from disagg.testing.processes import wait_until

    def has_seen() -> bool:
        try:
            watch.watched(0)
        except LookupError:
            return False
        return True

    with script.MachineWatch([0]) as watch:
        wait_until(has_seen, 30.0, "a first moment of core 0")
        moment = watch.watched(0).level(0.0, float("inf"))
        assert 0.0 < moment.compute_s < 1.0
        assert 0.0 < moment.memory_s < 1.0
        with pytest.raises(KeyError):
            watch.watched(99)
