"""Grammars over a small real vocabulary: what may come next, where an answer may end, what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from disagg.core.errors import InternalFault, InvalidRequest
from disagg.core.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from disagg.modelfiles.grammar import GrammarCompiler, check_grammar, schema_text
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.testing.tokenizer_files import write_tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Žofie"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def compiler(tokenizer: ModelTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def schema(value: dict[str, Any], *, is_lenient: bool = False) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, schema_text(value, is_lenient=is_lenient))


@pytest.mark.parametrize("seed", range(10))
def test_a_random_walk_is_a_valid_document(compiler: GrammarCompiler, tokenizer: ModelTokenizer, seed: int) -> None:
    chance, state = random.Random(seed), compiler.start(schema(PERSON))
    answer: list[int] = []
    while True:
        (allowed,) = state.allowed().nonzero()
        token_id = chance.choice(allowed.tolist())
        is_end = token_id in tokenizer.eos_ids
        assert is_end <= state.can_end  # the end is offered only where the document is whole
        if is_end:
            break
        state.accept([token_id])
        answer.append(token_id)
    document = json.loads(tokenizer.decode(answer))
    assert document["name"] in ("Ann", "Žofie")
    assert 0 <= document["age"] <= 150


def test_a_copy_and_a_replay_are_where_the_original_is(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode('{"name": "Ann", "age": 4')
    original = compiler.start(schema(PERSON))
    for token_id in ids:
        original.accept([token_id])
    replayed, copied = compiler.start(schema(PERSON)), original.copy()
    replayed.accept(ids)
    assert (original.allowed() == replayed.allowed()).all()
    copied.accept(tokenizer.encode("2}"))
    assert (original.allowed() == replayed.allowed()).all()  # the copy is one of its own
    assert copied.allowed().nonzero()[0].tolist() == list(tokenizer.eos_ids)


def test_what_is_not_allowed_is_a_fault(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    state = compiler.start(schema(PERSON))
    with pytest.raises(InternalFault, match="does not allow"):
        state.accept(tokenizer.encode("hello"))


def test_rules_with_schemas_inside(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    rules = f'start: "<call>" body "</call>"\nbody: %json {schema_text(PERSON, is_lenient=False)}'
    state = compiler.start(GrammarSpec(GrammarKind.LARK, rules))
    state.accept(tokenizer.encode('<call>{"name":"Ann","age":5}</call>'))
    assert state.can_end


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "not-a-type"}, "Invalid type: not-a-type"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"$ref": "#/$defs/nobody"}, "does not exist"),
        ({"type": "object", "not": {}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, value: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason.replace("(", r"\(")):
        check_grammar(schema(value))


def test_unknown_keywords_are_void_where_that_was_asked_for() -> None:
    check_grammar(schema({"type": "object", "not": {}}, is_lenient=True))


def test_nested_too_deeply_or_too_long() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidRequest, match="recursion limit"):
        check_grammar(schema(deep))
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_BYTES)):
        check_grammar(schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}))


def test_white_space_is_bounded(compiler: GrammarCompiler, tokenizer: ModelTokenizer) -> None:
    state = compiler.start(schema(PERSON))
    state.accept(tokenizer.encode("{\n" + " " * 24))
    allowed = {tokenizer.token_bytes(int(token_id)) for token_id in state.allowed().nonzero()[0]}
    assert allowed <= {b'"', b'"n', b'"na', b'"name', b'"name"'}


def test_a_vocabulary_without_bytes_or_end_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    vocabulary = load_tokenizer(folder)
    if not vocabulary.eos_ids:  # the names of its special tokens may tell
        with pytest.raises(Exception, match="end-of-text"):
            GrammarCompiler(vocabulary)
