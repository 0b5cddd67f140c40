"""First tokens that wait for their answers' own steps: told once, in order, by whoever goes on."""

from tests.unit.scheduler.rigs import Duo, Solo, sequence_id

from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import FirstToken, Role, Task
from disagg.telemetry.metrics import PREEMPTIONS

PROMPT, OTHER = tuple(range(10)), tuple(range(20, 30))
TASKS = (Task.PREFILL, Task.DECODE)


def pair(**destination: object) -> Duo:
    """Both ends are steady."""
    return Duo(
        Solo(Role.PREFILL, first_token=FirstToken.STEADY, name=WorkerId("p"), incarnation=Incarnation(1)),
        Solo(
            Role.DECODE,
            first_token=FirstToken.STEADY,
            name=WorkerId("d"),
            incarnation=Incarnation(2),
            **destination,  # type: ignore[arg-type]
        ),
    )


def ask(duo: Duo, number: int, prompt: tuple[int, ...], max_tokens: int = 3) -> None:
    """Its blocks are reserved and its prompt is in a step."""
    duo.start(number, TASKS, prompt, max_tokens)
    duo.exchange()
    assert duo.source.plan is not None


def positions(solo: Solo, number: int) -> list[int]:
    return [token.position for token in solo.tokens(number)]


def row_position(duo: Duo) -> int:
    """Of the first stream in the running step."""
    assert duo.destination.plan is not None
    return duo.destination.plan.rows[0].position


def begun(**destination: object) -> Duo:
    """A stream is in a step; another has just arrived."""
    duo = pair(**destination)
    ask(duo, 0, PROMPT)
    duo.step(duo.source)
    ask(duo, 1, OTHER)
    duo.step(duo.source)
    return duo


def test_where_no_step_runs_it_is_told_at_once() -> None:
    duo = pair()
    ask(duo, 0, PROMPT)
    duo.step(duo.source)
    assert positions(duo.source, 0) == []
    assert positions(duo.destination, 0) == [0]
    assert duo.destination.plan is not None


def test_else_it_is_told_when_its_own_step_begins() -> None:
    duo = begun()
    assert positions(duo.source, 1) == positions(duo.destination, 1) == []
    duo.step(duo.destination)
    assert positions(duo.destination, 1) == [0]
    assert duo.destination.plan is not None
    assert {row.sequence_id for row in duo.destination.plan.rows} == {sequence_id(0), sequence_id(1)}
    while duo.destination.plan is not None:
        duo.step(duo.destination)
    assert positions(duo.destination, 0) == positions(duo.destination, 1) == [0, 1, 2]
    assert positions(duo.source, 1) == []


def test_the_only_token_of_an_answer_waits_for_nothing() -> None:
    duo = pair()
    ask(duo, 0, PROMPT, max_tokens=1)
    duo.step(duo.source)
    assert positions(duo.source, 0) == [0]


def test_an_answer_that_is_given_up_has_none() -> None:
    duo = begun()
    duo.take(duo.destination, duo.destination.abort(1))
    duo.exchange()
    while duo.destination.plan is not None:
        duo.step(duo.destination)
    assert positions(duo.destination, 1) == []
    assert len(duo.destination.scheduler._state.first_tokens) == 0


def test_a_stream_that_has_to_start_over_does_not_keep_it() -> None:
    duo = pair(num_blocks=9, answer_headroom=2)
    ask(duo, 0, PROMPT, max_tokens=20)
    duo.step(duo.source)
    while row_position(duo) < 17:
        duo.step(duo.destination)
    ask(duo, 1, OTHER, max_tokens=20)
    while row_position(duo) < 23:
        duo.step(duo.destination)
    duo.step(duo.source)
    assert positions(duo.destination, 1) == []
    duo.step(duo.destination)  # the older stream needs the last block
    assert duo.destination.scheduler.counters.get(PREEMPTIONS) == 1
    assert positions(duo.destination, 1) == [0]
    while duo.destination.plan is not None:
        duo.step(duo.destination)
    assert positions(duo.destination, 1) == list(range(20))
