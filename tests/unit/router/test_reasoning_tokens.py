"""How many tokens of an answer were its thought: counted by the token, the same however the text is cut."""

from typing import Any

import pytest
from tests.unit.router.site import MakeSite
from tests.unit.router.test_answers import chunks_of, says
from tests.unit.router.test_messages import SHOWN, MakeText, make_text, site_with

from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.parser_names import ReasoningParser
from disagg.router.reasoning import ThoughtCounter
from disagg.router.text import ModelText

__all__ = ["make_text"]
OPEN = "{{ messages[0].content }}<think>\n"
SAID = ("<think>where?\n</think>\n\nLet me see.", "nothing thought", "\n<think>never ends", "<think></think>")
SAID_OPEN = ("where?\n</think>\n\nLet me see.", "never ends", "</think>at once")


@pytest.fixture
def thinking(make_text: MakeText) -> dict[bool, ModelText]:
    """By whether the template begins the thought."""
    return {
        is_open: make_text(OPEN if is_open else SHOWN, reasoning_parser=ReasoningParser.THINK)
        for is_open in (False, True)
    }


def expected(tokenizer: ModelTokenizer, said: str, *, is_open: bool) -> int:
    """All tokens up to the first after which </think> can be read; of one that never ends all, its end included."""
    ids = tokenizer.encode(said)
    if not is_open and not said.lstrip().startswith("<think>"):
        return 0
    ends = [count for count in range(1, len(ids) + 1) if "</think>" in tokenizer.decode(ids[:count])]
    return ends[0] if ends else len(ids) + 1


CASES = [
    *((False, (each,)) for each in SAID),
    (False, SAID),
    *((True, (each,)) for each in SAID_OPEN),
    (True, SAID_OPEN),
]


@pytest.mark.parametrize(("is_open", "said"), CASES)
async def test_usage_says_how_many_tokens_were_thought(
    make_site: MakeSite,
    thinking: dict[bool, ModelText],
    tokenizer: ModelTokenizer,
    is_open: bool,
    said: tuple[str, ...],
) -> None:
    site = site_with(make_site, thinking[is_open], *said)
    usage = (await site.chat(n=len(said))).json()["usage"]
    thought = sum(expected(tokenizer, each, is_open=is_open) for each in said)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    streamed = await site.chat(n=len(said), stream=True, stream_options={"include_usage": True})
    assert chunks_of(streamed)[-1]["usage"] == usage


async def test_counts_so_far_are_of_what_was_thought_so_far(
    make_site: MakeSite, thinking: dict[bool, ModelText], tokenizer: ModelTokenizer
) -> None:
    site = site_with(make_site, thinking[False], SAID[0])
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(await site.chat(stream=True, stream_options=options))
    thought = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks if chunk["usage"]]
    assert thought == sorted(thought)
    assert thought[-1] == expected(tokenizer, SAID[0], is_open=False)


async def test_a_stop_string_inside_a_thought_ends_both(
    make_site: MakeSite, thinking: dict[bool, ModelText], tokenizer: ModelTokenizer
) -> None:
    site = site_with(make_site, thinking[False], SAID[0])
    answer = (await site.chat(stop="ere")).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "wh"
    usage: dict[str, Any] = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


async def test_where_thoughts_are_not_told_from_the_rest_nothing_is_said_of_them(
    make_site: MakeSite, thinking: dict[bool, ModelText], make_text: MakeText
) -> None:
    for text in (make_text(), make_text(reasoning_parser=ReasoningParser.NONE)):
        site = site_with(make_site, text, SAID[0])
        assert "completion_tokens_details" not in (await site.chat()).json()["usage"]
    site = site_with(make_site, thinking[True], SAID[0])
    assert "completion_tokens_details" not in (await site.complete()).json()["usage"]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("said", SAID + SAID_OPEN)
def test_the_count_is_of_pieces_whatever_they_are(said: str, is_open: bool) -> None:
    """One character a token: as many as the thought and its marks have characters."""
    counter = ThoughtCounter(is_open=is_open)
    for character in said:
        counter.push(character)
    has_thought = is_open or said.lstrip().startswith("<think>")
    end = said.find("</think>")
    assert counter.num_tokens == (0 if not has_thought else len(said) if end < 0 else end + len("</think>"))
    assert ThoughtCounter(is_open=is_open).num_tokens == 0


def test_scripts_end_where_they_are_said_to(tokenizer: ModelTokenizer) -> None:
    """Or the counts above are of something else."""
    assert says(tokenizer, "x").tokens[0][-1] in tokenizer.eos_ids
