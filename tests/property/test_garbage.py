"""Whatever a body holds, it is read or refused by the name of a field; what is not described is refused."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.core.errors import InvalidRequest
from disagg.router.description import Endpoint, body_schema
from disagg.router.fields import JsonObject
from disagg.router.openai_types import read_chat, read_completion

WORDS = (
    *("user", "assistant", "tool", "system", "text", "json_object", "json_schema", "function", "none", "auto"),
    *("required", "role", "content", "type", "name", "schema", "strict", "tool_calls", "tool_call_id", "arguments"),
    *("include_usage", "continuous_usage_stats", "parameters", "description", "5", "7"),
)
TEXTS = st.sampled_from(WORDS) | st.text(max_size=6)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(-3, 3)
    | TEXTS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=10
)
READERS: dict[Endpoint, tuple[Callable[[JsonObject], object], dict[str, Any]]] = {
    Endpoint.CHAT: (read_chat, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    Endpoint.COMPLETIONS: (read_completion, {"model": "m", "prompt": "hi"}),
}
NAMES = sorted({name for endpoint in READERS for name in body_schema(endpoint)["properties"]})


@pytest.mark.parametrize("endpoint", READERS)
@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3))
@settings(max_examples=examples(400))
def test_no_garbage_is_taken_and_none_breaks_anything(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    read, plain = READERS[endpoint]
    body = {**plain, **fields}
    is_described = jsonschema.Draft202012Validator(body_schema(endpoint)).is_valid(body)
    refused = refusal_of(read, body)
    if refused is None:
        assert is_described, f"taken, although the description does not allow it: {fields}"
    else:
        assert refused.partition(".")[0].partition("[")[0] in body


def refusal_of(read: Callable[[JsonObject], object], body: dict[str, Any]) -> str | None:
    """The field by which it is refused; None for a body that is taken."""
    try:
        read(body)
    except InvalidRequest as error:
        return error.param or "no field"
    return None
