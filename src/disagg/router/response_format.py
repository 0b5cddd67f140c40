"""`response_format` of a chat request: which grammar its answer follows."""

from collections.abc import Mapping
from typing import Final, cast

import msgspec

from disagg.core.errors import ConfigurationError, InvalidRequest
from disagg.core.grammar import GrammarSpec
from disagg.modelfiles.grammar import check_grammar, schema_text
from disagg.router.fields import Fields, JsonObject

_ANY_OBJECT: Final[Mapping[str, object]] = {"type": "object"}
_PARAM: Final = "response_format"


class ResponseFormat(msgspec.Struct, frozen=True):
    """The schema that an answer follows, as a grammar takes it."""

    schema: str
    param: str  # the field that it came from


def read_response_format(fields: Fields) -> ResponseFormat | None:
    """None for plain text. Raises InvalidRequest naming the field that is wrong."""
    given = fields.nested(_PARAM)
    if given is None:
        return None
    kind = given.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        given.nested("schema")  # an extension of other servers; refused if it is no object
        schema = cast(JsonObject, given.values.get("schema") or _ANY_OBJECT)
        return ResponseFormat(schema_text(schema, is_lenient=True), f"{_PARAM}.schema")
    if kind != "json_schema":
        text = f"'{_PARAM}.type' is {kind[:40]!r}; it must be text, json_object or json_schema"
        raise InvalidRequest(text, param=f"{_PARAM}.type")
    given.required("json_schema")
    inner = given.nested("json_schema")
    assert inner is not None  # required() saw it
    if inner.has("description"):
        inner.text("description")
    is_strict = inner.boolean("strict")
    if not inner.has("schema"):
        text = f"'{inner.name('schema')}' is required: it holds the JSON schema itself"
        raise InvalidRequest(text, param=inner.name("schema"), code="missing_parameter")
    outer = inner.nested("schema")
    assert outer is not None  # has() saw it
    inner.identifier("name")
    return ResponseFormat(schema_text(outer.values, is_lenient=not is_strict), inner.name("schema"))


def checked(grammar: GrammarSpec, param: str) -> GrammarSpec:
    """Raises InvalidRequest, with the reason, for a grammar that no answer could follow."""
    try:
        check_grammar(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"'{param}' cannot be followed: {error}", param=param, code="invalid_schema") from error
    except ConfigurationError as error:
        text = f"'{param}' cannot be followed here: {error}"
        raise InvalidRequest(text, param=param, code="unsupported_parameter") from error
    return grammar
