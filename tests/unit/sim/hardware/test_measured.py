"""Tables that were measured: between points, beyond them, and tables that cannot be."""

from pathlib import Path

import pytest

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.interpolation import Outside, Surface
from disagg.sim.hardware.measured import MeasuredCard, MeasuredPoint, MeasuredTable, read_points
from disagg.sim.hardware.step_model import StepShape

CARD = MeasuredCard("table", kv_bytes_per_token=10, num_layers=2, kv_tokens=1001)
POINTS = (
    MeasuredPoint(1.0, prompt_tokens=100),
    MeasuredPoint(3.0, prompt_tokens=200),
    MeasuredPoint(2.0, prompt_tokens=100, cached_tokens=50),
    MeasuredPoint(4.0, prompt_tokens=200, cached_tokens=50),
    MeasuredPoint(0.1, num_streams=1, context=10),
    MeasuredPoint(0.3, num_streams=3, context=10),
    MeasuredPoint(0.2, num_streams=1, context=30),
    MeasuredPoint(0.4, num_streams=3, context=30),
)


def table(outside: Outside = Outside.EXTEND) -> MeasuredTable:
    return MeasuredTable(CARD, POINTS, outside=outside)


def test_points_are_met_and_between_them_it_is_linear() -> None:
    assert table().step_s(StepShape(((100, 0),))) == 1.0
    assert table().step_s(StepShape(((150, 0),))) == 2.0
    assert table().step_s(StepShape(((150, 25),))) == 2.5
    assert table().step_s(StepShape((), 2 * 20, 2)) == pytest.approx(0.25)


def test_prompts_of_one_step_count_together() -> None:
    assert table().step_s(StepShape(((50, 0), (100, 0)))) == 2.0
    assert table().step_s(StepShape(((50, 100), (50, 0)))) == 2.0  # 50 cached for the mean token


def test_both_phases_take_the_sum_and_nothing_takes_nothing() -> None:
    assert table().step_s(StepShape(((100, 0),), 10, 1)) == pytest.approx(1.1)
    assert table().step_s(StepShape()) == 0.0


def test_beyond_the_points_it_is_as_was_asked() -> None:
    far = StepShape(((300, 0),))
    assert table().step_s(far) == 5.0
    assert table(Outside.CLAMP).step_s(far) == 3.0
    with pytest.raises(ConfigurationError, match="300 were not measured, only 100 to 200"):
        table(Outside.REFUSE).step_s(far)
    assert table().step_s(StepShape(((1, 0),))) == 0.0  # the line would fall below 0


def test_repeats_count_by_their_median() -> None:
    surface = Surface([(0, 1, 5.0), (0, 1, 1.0), (0, 1, 2.0)], "x", Outside.REFUSE)
    assert surface.at(1) == 2.0


def test_a_phase_that_was_not_measured_is_refused() -> None:
    prompts = MeasuredTable(CARD, POINTS[:2])
    with pytest.raises(ConfigurationError, match="no measured streams"):
        prompts.step_s(StepShape((), 1, 1))
    streams = MeasuredTable(CARD, POINTS[4:])
    with pytest.raises(ConfigurationError, match="no measured prompts"):
        streams.step_s(StepShape(((1, 0),)))


def test_kv_room_is_in_whole_blocks() -> None:
    assert table().max_kv_tokens(16) == 992


@pytest.mark.parametrize(
    "points",
    [
        (),
        (MeasuredPoint(0.0, prompt_tokens=1),),
        (MeasuredPoint(1.0),),
        (MeasuredPoint(1.0, prompt_tokens=1, num_streams=1),),
    ],
)
def test_tables_that_cannot_be_are_refused(points: tuple[MeasuredPoint, ...]) -> None:
    with pytest.raises(ConfigurationError, match="table"):
        MeasuredTable(CARD, points)


def test_files_say_the_same_in_csv_and_json(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("seconds,prompt_tokens,num_streams,context\n1.0,100,,\n0.1,,1,10\n")
    (tmp_path / "t.json").write_text(
        '[{"seconds":1.0,"prompt_tokens":100},{"seconds":0.1,"num_streams":1,"context":10}]'
    )
    expected = [MeasuredPoint(1.0, prompt_tokens=100), MeasuredPoint(0.1, num_streams=1, context=10)]
    assert read_points(tmp_path / "t.csv") == read_points(tmp_path / "t.json") == expected


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("seconds,prompt_tokens\n1.0,100\nsoon,200\n")
    with pytest.raises(ConfigurationError, match="line 3 of"):
        read_points(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_points(tmp_path / "none.csv")
