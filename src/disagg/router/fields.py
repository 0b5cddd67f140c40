"""Reading a JSON object from outside field by field. Every refusal is an InvalidRequest that names the field."""

import re
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from disagg.core.errors import InvalidRequest

JsonObject = Mapping[str, object]

DEFAULT_MAX_DEPTH: Final = 64
IDENTIFIER: Final = "[a-zA-Z0-9_-]{1,64}"


def read_object(body: bytes, max_depth: int = DEFAULT_MAX_DEPTH) -> JsonObject:
    """The body as a JSON object. Raises InvalidRequest when it is none, or nested deeper than max_depth."""
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind_of(value)}", code="invalid_json")
    _check_depth(value, max_depth)
    return cast(JsonObject, value)


def _check_depth(value: object, max_depth: int) -> None:
    layer: list[object] = [value]
    for _ in range(max_depth):
        inner = (each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list))
        layer = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not layer:
            return
    raise InvalidRequest(f"the body is nested deeper than {max_depth} levels; flatten it", code="invalid_json")


def kind_of(value: object) -> str:
    """JSON's word for a decoded value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def wrong_type(name: str, wanted: str, value: object) -> InvalidRequest:
    """The error for a field of another type than it must have."""
    return InvalidRequest(f"'{name}' must be {wanted}, not {kind_of(value)}", param=name, code="invalid_type")


class Fields:
    """One JSON object being read. A field that is null counts as absent, as in OpenAI's own API."""

    def __init__(self, values: JsonObject, prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix  # "messages[2]." in front of names in errors

    def name(self, key: str) -> str:
        return self.prefix + key

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def required(self, key: str) -> object:
        if not self.has(key):
            raise InvalidRequest(f"'{self.name(key)}' is required", param=self.name(key), code="missing_parameter")
        return self.values[key]

    def text(self, key: str) -> str:
        value = self.required(key)
        if not isinstance(value, str):
            raise wrong_type(self.name(key), "a string", value)
        return value

    def identifier(self, key: str) -> str:
        """What OpenAI takes as a name."""
        value = self.text(key)
        if not re.fullmatch(IDENTIFIER, value):
            text = f"'{self.name(key)}' is {value[:80]!r}; it must have 1 to 64 letters, digits, '_' and '-'"
            raise InvalidRequest(text, param=self.name(key))
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(self.name(key), "true or false", value)
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]; None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        # 5.0 is an integer in JSON.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(self.name(key), "an integer", value)
        self._check_range(key, value, low, high)
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number in [low, high]."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.name(key), "a number", value)
        self._check_range(key, value, low, high)
        return float(value)

    def nested(self, key: str) -> "Fields | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self.name(key), "an object", value)
        return Fields(cast(JsonObject, value), f"{self.name(key)}.")

    def array(self, key: str) -> list[object] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong_type(self.name(key), "an array", value)
        return cast(list[object], value)

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """A parameter of OpenAI's API that is not supported yet may only be absent or at a value without effect."""
        value = self.values.get(key)
        # True == 1 in Python, not in JSON.
        if value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        ):
            return
        raise InvalidRequest(
            f"'{self.name(key)}' is not supported yet; leave it out", param=self.name(key), code="unsupported_parameter"
        )

    def _check_range(self, key: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise InvalidRequest(
                f"'{self.name(key)}' is {value}; it must be between {low} and {high}",
                param=self.name(key),
                code="out_of_range",
            )
