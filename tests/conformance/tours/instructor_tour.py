"""instructor: checked types in each of its modes."""

from typing import Any

import instructor
import openai
from tests.conformance.tours.report import Animal, Served, tour


def create(served: Served, mode: Any, **more: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=served.url, api_key=served.key), mode=mode)
    return client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "the quick brown fox"}],
        response_model=Animal,
        max_tokens=300,
        temperature=0,
        max_retries=0,
        **more,
    )


def by_call(served: Served) -> None:
    assert isinstance(create(served, instructor.Mode.TOOLS), Animal)


def by_strict_call(served: Served) -> None:
    assert isinstance(create(served, instructor.Mode.TOOLS_STRICT), Animal)


def by_schema(served: Served) -> None:
    assert isinstance(create(served, instructor.Mode.JSON_SCHEMA), Animal)


if __name__ == "__main__":
    tour("instructor", by_call, by_strict_call, by_schema)
