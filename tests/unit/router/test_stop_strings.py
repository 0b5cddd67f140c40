"""Stop strings against a plain definition: the one complete first, the longer of two that end together."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.stop_strings import StopAutomaton, StopFilter

STOPS = st.lists(st.text("abcé", min_size=1, max_size=5), min_size=1, max_size=4)
DELTAS = st.lists(st.text("abcé", max_size=6), max_size=8)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reference: what of a whole text may be shown."""
    for end in range(1, len(text) + 1):
        matches = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(matches)], True
    return text, False


def longest_held(text: str, stops: list[str]) -> int:
    """Reference: length of the longest suffix that is a proper prefix of some stop string."""
    return max(length for length in range(len(text) + 1) if any(is_start(text[len(text) - length :], s) for s in stops))


def is_start(part: str, stop: str) -> bool:
    return len(part) < len(stop) and stop.startswith(part)


@given(STOPS, DELTAS)
def test_any_segmentation_shows_what_the_whole_shows(stops: list[str], deltas: list[str]) -> None:
    stream = StopFilter(StopAutomaton(stops))
    shown = ""
    for delta in deltas:
        shown += stream.push(delta)
        stream.check_invariants()
        assert cut(shown, stops) == (shown, False)  # no stop string ever shows
    is_stopped = stream.is_stopped
    shown += stream.flush()
    assert (shown, is_stopped) == cut("".join(deltas), stops)


@given(STOPS, DELTAS)
def test_held_back_is_minimal(stops: list[str], deltas: list[str]) -> None:
    stream = StopFilter(StopAutomaton(stops))
    text, shown = "", ""
    for delta in deltas:
        text += delta
        shown += stream.push(delta)
        if stream.is_stopped:
            return
        assert len(text) - len(shown) == longest_held(text, stops)


def test_stop_over_several_deltas() -> None:
    stream = StopFilter(StopAutomaton(["DEFGHIJ"]))
    assert [stream.push(delta) for delta in ("ABCDEF", "G", "HI", "JK")] == ["ABC", "", "", ""]
    assert stream.is_stopped
    assert stream.push("more") == stream.flush() == ""


def test_false_start_is_let_go() -> None:
    stream = StopFilter(StopAutomaton(["aab"]))
    assert stream.push("aa") == ""
    assert stream.push("a") == "a"  # "aa" can still become a stop string
    assert stream.push("x") == "aax"
    assert stream.flush() == ""


def test_a_stop_string_inside_another() -> None:
    assert cut("abcd", ["bcd", "c"]) == ("ab", True)
    stream = StopFilter(StopAutomaton(["bcd", "c"]))
    assert stream.push("abcd") == "ab"
