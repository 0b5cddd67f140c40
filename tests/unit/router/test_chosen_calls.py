"""Calls that the model may or may not make: with strict tools its text is free, and what it calls is enforced."""

import random
from typing import Any

import pytest
from tests.unit.router.site import MakeSite
from tests.unit.router.test_answers import says
from tests.unit.router.test_messages import CALL, CLOCK, SHOWN, WEATHER, MakeText, make_text, site_with

from disagg.core.errors import InternalFault
from disagg.core.grammar import GrammarSpec
from disagg.modelfiles.grammar import GrammarCompiler
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.text import ModelText

__all__ = ["make_text"]
STRICT: dict[str, Any] = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
OPEN = "{{ messages[0].content }}<think>\n"
WRONG = CALL.replace('"Praha"', "5")
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Praha"}}'
THOUGHT = f"<think>if I wrote {CALL} or {WRONG}\n</think>\n\n"


async def grammar_of(make_site: MakeSite, text: ModelText, **more: Any) -> GrammarSpec | None:
    """What is asked of the workers."""
    site = site_with(make_site, text, "x")
    response = await site.chat(**{"tools": [STRICT, CLOCK], **more})
    assert response.status_code == 200, response.text
    return site.service.streams[-1].request.sampling.grammar


def follows(compiler: GrammarCompiler, grammar: GrammarSpec, ids: list[int]) -> bool:
    """Whether it may be written, and may end there."""
    state = compiler.start(grammar)
    try:
        for token_id in ids:  # as a worker does: each token was allowed when it was taken
            if not state.allowed()[token_id]:
                return False
            state.accept([token_id])
    except InternalFault:
        return False
    return state.can_end


@pytest.fixture(scope="module")
def compiler(tokenizer: ModelTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


GOOD = ["plain", "", "Let me see.\n" + CALL, f"{CALL}\n{CALL}", f"{CALL} and so on", "<tool_cal", "a < b </tool_call>"]
BAD = [WRONG, f"Let me see. {WRONG}", f"{CALL}{WRONG}", "<tool_call>", "<tool_call>hello", CALL.replace("weather", "x")]


@pytest.mark.parametrize("begun", ["", "<think>hm</think>", THOUGHT, " \n<think>\n</think>"])
async def test_hermes(make_site: MakeSite, make_text: MakeText, compiler: GrammarCompiler, begun: str) -> None:
    text = make_text(reasoning_parser=ReasoningParser.THINK if begun else ReasoningParser.NONE)
    grammar = await grammar_of(make_site, text)
    assert grammar is not None
    for answer in GOOD:
        assert follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer
    for answer in BAD:
        assert not follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer


@pytest.mark.parametrize("begun", ["", "hm </think>\n\n"])
async def test_where_a_thought_may_come_or_has_begun(
    make_site: MakeSite, make_text: MakeText, compiler: GrammarCompiler, begun: str
) -> None:
    """Without one, the answer is as free and as strict as after one."""
    text = make_text(OPEN if begun else SHOWN, reasoning_parser=ReasoningParser.THINK)
    grammar = await grammar_of(make_site, text)
    assert grammar is not None
    for answer in GOOD:
        assert follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer
    for answer in BAD:
        assert not follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer


async def test_one_call_at_a_time(make_site: MakeSite, make_text: MakeText, compiler: GrammarCompiler) -> None:
    text = make_text()
    grammar = await grammar_of(make_site, text, parallel_tool_calls=False)
    assert grammar is not None
    for answer, is_good in (("plain", True), (f"So: {CALL}", True), (f"{CALL}\n{CALL}", False), (WRONG, False)):
        assert follows(compiler, grammar, text.tokenizer.encode(answer)) is is_good, answer


@pytest.mark.parametrize("begun", ["", "<think>{</think>\n"])
async def test_llama(make_site: MakeSite, make_text: MakeText, compiler: GrammarCompiler, begun: str) -> None:
    reasoning = ReasoningParser.THINK if begun else ReasoningParser.NONE
    text = make_text(tool_parser=ToolParser.LLAMA3, reasoning_parser=reasoning)
    grammar = await grammar_of(make_site, text)
    assert grammar is not None
    several = f'{LLAMA_CALL}; {{"name": "clock", "parameters": {{}}}}'
    wrong = LLAMA_CALL.replace('"Praha"', "5")
    for answer in ("plain {}", "", "\n\n  so", LLAMA_CALL, several, f"\n {LLAMA_CALL}", f"<|python_tag|>{LLAMA_CALL}"):
        assert follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer
    for answer in (wrong, f" {wrong}", f"<|python_tag|> {wrong}", '{"a": 1}', f"{LLAMA_CALL} and so on"):
        assert not follows(compiler, grammar, text.tokenizer.encode(begun + answer)), answer


async def test_only_strict_tools_ask_for_a_grammar(make_site: MakeSite, make_text: MakeText) -> None:
    text = make_text()
    assert await grammar_of(make_site, text, tools=[WEATHER, CLOCK]) is None
    assert await grammar_of(make_site, text, tools=[STRICT], tool_choice="none") is None
    assert await grammar_of(make_site, text, tools=[STRICT]) is not None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", [ToolParser.HERMES, ToolParser.LLAMA3])
async def test_whatever_is_written_its_calls_follow_their_schemas(
    make_site: MakeSite, make_text: MakeText, compiler: GrammarCompiler, family: ToolParser, seed: int
) -> None:
    """A random answer that is nudged into calls; a state made anew from its tokens allows what the living one does."""
    text, chance = make_text(tool_parser=family), random.Random(seed)
    grammar = await grammar_of(make_site, text)
    assert grammar is not None
    state, ids = compiler.start(grammar), list[int]()
    nudge = text.tokenizer.encode("so <tool_call>" if family is ToolParser.HERMES else "\n{")
    ends = set(text.tokenizer.eos_ids)
    while len(ids) < 120:
        allowed = state.allowed()
        assert (anew(compiler, grammar, ids).allowed() == allowed).all()
        options = [each for each in allowed.nonzero()[0].tolist() if each not in ends]
        if not options:
            break
        next_id = nudge[len(ids)] if len(ids) < len(nudge) else chance.choice(options)
        assert allowed[next_id]
        state.accept([next_id])
        ids.append(next_id)
    spoken = make_site(lambda request: says(text.tokenizer, text.tokenizer.decode(ids)), models={"tiny": text})
    (choice,) = (await spoken.chat(tools=[STRICT, CLOCK])).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] in ("weather", "clock")


def anew(compiler: GrammarCompiler, grammar: GrammarSpec, ids: list[int]) -> Any:
    """As whoever goes on with an answer makes it."""
    state = compiler.start(grammar)
    state.accept(ids)
    return state


async def test_a_grammar_and_a_least_length_do_not_go_together(make_site: MakeSite, make_text: MakeText) -> None:
    site = site_with(make_site, make_text(), "x")
    error = (await site.chat(tools=[STRICT], min_tokens=3)).json()["error"]
    assert error["param"] == "min_tokens"
    assert "'strict' tools" in error["message"]


async def test_without_the_library_strict_tools_are_refused(
    make_site: MakeSite, make_text: MakeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.modelfiles.grammar._MISSING", "No module named 'llguidance'")
    site = site_with(make_site, make_text(), "x")
    response = await site.chat(tools=[STRICT])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
