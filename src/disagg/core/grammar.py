"""Which texts an answer may be. What a grammar allows next is a function of it and of the tokens so far."""

import enum
from typing import Final

import msgspec

# Of its text in UTF-8: every choice of a request carries it, and the largest takes a quarter of a second to compile.
MAX_GRAMMAR_BYTES: Final = 64 << 10


class GrammarKind(enum.StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    LARK = "lark"  # rules, with `%json {…}` for schemas inside them


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as it travels with its sequence: at most MAX_GRAMMAR_BYTES of text."""

    kind: GrammarKind
    text: str
