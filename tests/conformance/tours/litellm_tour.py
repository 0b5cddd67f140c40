"""litellm: its own reading of answers, usage and errors."""

import json
from typing import Any

import litellm
from tests.conformance.tours.report import Animal, Served, tour

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"enum": ["left", "right"]}},
            "required": ["direction"],
            "additionalProperties": False,
        },
    },
}


def ask(served: Served, **more: Any) -> Any:
    body = {"model": f"openai/{served.model}", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
    return litellm.completion(api_base=served.url, api_key=served.key, num_retries=0, **body)


def chat(served: Served) -> None:
    answer = ask(served, logprobs=True, top_logprobs=2)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")


def stream(served: Served) -> None:
    whole = ask(served).choices[0].message.content
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == whole


def tools(served: Served) -> None:
    answer = ask(served, tools=[MOVE], tool_choice="required", max_tokens=300)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["direction"] in ("left", "right")


def structured(served: Served) -> None:
    answer = ask(served, response_format=Animal, max_tokens=200)
    Animal.model_validate_json(answer.choices[0].message.content)


def text_completion(served: Served) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{served.model}",
        prompt="the quick",
        max_tokens=4,
        api_base=served.url,
        api_key=served.key,
    )
    assert isinstance(answer.choices[0].text, str)


def errors(served: Served) -> None:
    for other, kind in (
        (served._replace(model="none"), litellm.NotFoundError),
        (served._replace(key="nobody-knows-it"), litellm.AuthenticationError),
    ):
        try:
            ask(other)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    try:
        ask(served, temperature=9)
    except litellm.BadRequestError:
        return
    raise AssertionError("no BadRequestError")


if __name__ == "__main__":
    tour("litellm", chat, stream, tools, structured, text_completion, errors)
