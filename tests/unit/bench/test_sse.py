"""Events out of bytes in any pieces; prompts out of runs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.bench.mix import load_mix, mix_names
from disagg.bench.prompts import WORDS, PromptSource
from disagg.bench.sse import MAX_EVENT_BYTES, EventParser
from disagg.bench.workload import ANSWER_LABEL, Run
from disagg.core.errors import ConfigurationError

BYTES = b': hello\n\ndata: {"a":1}\r\n\r\nevent: x\ndata:2\ndata: 3\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b"2\n3", b"[DONE]"]


@given(st.lists(st.integers(0, len(BYTES)), max_size=12))
def test_events_do_not_depend_on_how_bytes_come(cuts: list[int]) -> None:
    parser = EventParser()
    ends = [0, *sorted(cuts), len(BYTES)]
    found = [event for start, stop in itertools.pairwise(ends) for event in parser.feed(BYTES[start:stop])]
    parser.check_invariants()
    assert found == EVENTS


def test_an_endless_event_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(ValueError, match="bytes"):
        parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES)


def test_equal_beginnings_of_runs_are_equal_beginnings_of_prompts() -> None:
    source = PromptSource(7, ids=tuple(range(100, 400)))
    long, short = source.token_ids((Run(2, 50), Run(3, 10))), source.token_ids((Run(2, 20),))
    assert len(long) == 60
    assert long[:20] == short
    assert source.text((Run(2, 50),)).startswith(source.text((Run(2, 20),)))
    assert PromptSource(8, ids=tuple(range(100, 400))).token_ids((Run(2, 20),)) != short
    assert len(source.text((Run(2, 50),)).split()) == 50
    assert len(set(WORDS)) == len(WORDS) > 250


def test_a_conversation_carries_the_answers_that_were_given() -> None:
    source = PromptSource(7)
    runs = (Run(2, 3), Run(ANSWER_LABEL, 4), Run(5, 2))
    said = source.messages(runs, ["the answer"])
    assert [each["role"] for each in said] == ["user", "assistant", "user"]
    assert said[1]["content"] == "the answer"
    assert "the answer" in source.text(runs, ["the answer"])


@pytest.mark.parametrize("name", mix_names())
def test_every_mix_of_the_package_can_be_asked(name: str) -> None:
    import random

    mix = load_mix(name)
    assert mix.about
    stream = mix.workload(2.0, 10).start(random.Random(1))
    first = stream.next_request()
    assert first is not None
    assert first.num_prompt_tokens >= 1


def test_a_mix_that_is_none_is_named(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(ConfigurationError, match="chat, code, rag"):
        load_mix("nonsense")
    path = Path(str(tmp_path)) / "mine.toml"
    path.write_text("rate_per_s = 1.0\nnum_requests = 3\nprompt = { mean = 0 }\noutput = { mean = 1 }\n")
    with pytest.raises(ConfigurationError, match="mean must be above 0"):
        load_mix(str(path))
    path.write_text("rate_per_s = = 1")
    with pytest.raises(ConfigurationError, match=r"mine\.toml"):
        load_mix(str(path))
