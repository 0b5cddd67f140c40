"""Whatever a client puts into tools, tool_choice, response_format and earlier calls: a plan, or a 400 that says why."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.core.errors import InvalidRequest
from disagg.core.grammar import MAX_GRAMMAR_BYTES
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.answer_plan import AnswerForm, AnswerPlan, plan_answer
from disagg.router.openai_types import read_chat
from disagg.router.parser_names import ReasoningParser, ToolParser
from disagg.router.text import ModelText
from disagg.testing.tokenizer_files import write_tiny_tokenizer

KEYS = [
    "type",
    "function",
    "name",
    "parameters",
    "strict",
    "schema",
    "json_schema",
    "json_object",
    "object",
    "string",
    "integer",
    "array",
    "required",
    "properties",
    "items",
    "enum",
    "const",
    "$ref",
    "#",
    "#/$defs/a",
    "$defs",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "additionalProperties",
    "x-guidance",
    "whitespace_pattern",
    "format",
    "tool_choice",
    "arguments",
    "id",
    "tool_call_id",
]
words = st.one_of(st.sampled_from(KEYS), st.text(max_size=4))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)
functions = st.fixed_dictionaries(
    {"name": st.one_of(st.sampled_from(("f", "g")), words)}, optional={"parameters": anything, "strict": scalars}
)
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=3)
choices = st.one_of(
    st.sampled_from(("auto", "none", "required")),
    st.just({"type": "function", "function": {"name": "f"}}),
    anything,
)
documents = st.fixed_dictionaries({"name": st.just("n"), "schema": anything})
formats = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(("json_schema", "json_object", "text"))},
        optional={"json_schema": st.one_of(documents, anything), "schema": anything},
    ),
    anything,
)
calls = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": words, "arguments": words})})
turns = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "tool_calls": st.one_of(st.lists(calls, max_size=2), anything)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": anything, "content": anything}),
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
required: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("m"),
    "messages": st.lists(turns, max_size=2).map(lambda more: [USER, *more]),
}
optional: dict[str, st.SearchStrategy[Any]] = {
    "tools": st.one_of(tools, anything),
    "tool_choice": choices,
    "response_format": formats,
}
bodies = st.fixed_dictionaries(required, optional=optional)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))))


Planned = tuple[AnswerForm, AnswerPlan]


def planned(text: ModelText, body: dict[str, Any], tools: ToolParser, reasoning: ReasoningParser) -> Planned | str:
    """What would be done, or the field that was refused."""
    try:
        request = read_chat(body)
        prompt = text.chat_prompt(request.messages, request.form.tool_use.shown)
        return request.form, plan_answer(request.form, tools, reasoning, prompt)
    except InvalidRequest as error:
        return error.param or ""


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(body=bodies, tool_parser=st.sampled_from((ToolParser.HERMES, ToolParser.LLAMA3)), is_thinking=st.booleans())
def test_a_plan_or_a_refusal(text: ModelText, body: dict[str, Any], tool_parser: ToolParser, is_thinking: bool) -> None:
    found = planned(text, body, tool_parser, ReasoningParser.THINK if is_thinking else ReasoningParser.NONE)
    if isinstance(found, str):
        assert found
        return
    form, plan = found
    assert (plan.grammar is not None) == form.needs_grammar
    if plan.grammar is not None:
        assert len(plan.grammar.text.encode()) <= MAX_GRAMMAR_BYTES
    assert (plan.reading is not None) == bool(form.tool_use.shown or is_thinking)
