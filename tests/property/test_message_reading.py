"""However an answer's text is cut into pieces, its parts are those of the whole text, and nothing is lost."""

from itertools import pairwise
from typing import Any

import jsonschema
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.modelfiles.grammar import check_grammar, schema_text, start_bytewise
from disagg.router.message_reader import MessageReader, MessageReading
from disagg.router.parser_names import ToolParser
from disagg.router.tools.spec import ToolMode

MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "get", "arguments": {"a": [1, "}"]}}',
    '{"name": "put", "parameters": "{}"}',
    '{"name": "get", "arguments": ',
    '{"name"',
    "<tool_call>\n",
    "; ",
    '"',
    "\\",
    "}",
    " ",
    "\n\n",
    "é",
)
texts = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=12).map("".join)
readings = st.builds(
    MessageReading,
    parser=st.sampled_from((ToolParser.HERMES, ToolParser.LLAMA3)),
    names=st.sampled_from(((), ("get", "put"))),
    mode=st.just(ToolMode.AUTO),
    is_parallel=st.just(True),
    is_thinking=st.booleans(),
    is_open=st.booleans(),
)


def read(how: MessageReading, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    reader = MessageReader(how)
    deltas = [reader.push(piece) for piece in pieces] + [reader.flush()]
    calls: list[tuple[str, str]] = []
    for delta in (call for each in deltas for call in each.calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        name, arguments = calls[delta.index]
        calls[delta.index] = (name, arguments + delta.arguments)
    return "".join(each.content for each in deltas), "".join(each.reasoning for each in deltas), calls


@settings(max_examples=examples(400))
@given(how=readings, text=texts, data=st.data())
def test_any_cut_gives_the_same_message(how: MessageReading, text: str, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in pairwise((0, *places, len(text)))]
    whole = read(how, [text])
    assert read(how, pieces) == whole
    assert read(how, list(text)) == whole
    content, reasoning, calls = whole
    if not calls and not (how.is_thinking and "think>" in text) and not how.is_open:
        assert content == text  # what is no call is content, every character of it
    assert len(content) + len(reasoning) <= len(text)
    for name, _ in calls:
        assert name in how.names


scalars: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    (
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"enum": ["x", 3, None, "é"]},
        {"const": {"deep": [1]}},
    )
)


def larger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def object_of(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = sorted(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    names = st.sampled_from(("a", "b", "long name", 'q"uote'))
    return st.one_of(
        st.builds(object_of, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


schemas = st.recursive(scalars, larger, max_leaves=6)


@settings(max_examples=examples(60))
@given(schema=schemas, data=st.data())
def test_documents_of_random_schemas_are_valid(schema: dict[str, Any], data: st.DataObject) -> None:
    """Byte by byte through the grammar, choosing at random: what it lets end is a document of the schema."""
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, schema_text(schema, is_lenient=False))
    check_grammar(spec)
    random = data.draw(st.randoms(use_true_random=False))
    state = start_bytewise(spec)
    written: list[int] = []
    while True:
        allowed = state.allowed().nonzero()[0].tolist()
        assert allowed
        if 256 in allowed:
            assert state.can_end
            break
        byte = random.choice(allowed)
        state.accept([byte])
        written.append(byte)
        assert len(written) < 2000
    jsonschema.validate(msgspec.json.decode(bytes(written)), schema)
