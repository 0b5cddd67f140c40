"""langchain-openai: invoke, stream, batch, tools and structured answers."""

from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from tests.conformance.tours.report import Animal, Served, tour

PROMPT = "the quick brown fox"


def move(direction: Literal["left", "right"]) -> str:
    """Go."""
    return f"went {direction}"


MOVE: Any = tool(move)


def chat_model(served: Served, **more: Any) -> Any:
    settings = {"max_tokens": 8, "temperature": 0, "max_retries": 0, **more}
    return ChatOpenAI(model=served.model, base_url=served.url, api_key=served.key, stream_usage=True, **settings)


def invoke(served: Served) -> None:
    answer = chat_model(served).invoke(PROMPT)
    assert answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["model_name"] == served.model


def stream(served: Served) -> None:
    whole = chat_model(served).invoke(PROMPT)
    parts = list(chat_model(served).stream(PROMPT))
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def batch(served: Served) -> None:
    answers = chat_model(served).batch([PROMPT, "over the lazy dog", PROMPT])
    assert answers[0].content == answers[2].content


def tools(served: Served) -> None:
    bound = chat_model(served, max_tokens=300).bind_tools(
        [MOVE], tool_choice="required", strict=True, parallel_tool_calls=False
    )
    answer = bound.invoke(PROMPT)
    (call,) = answer.tool_calls
    done = MOVE.invoke(call)
    assert isinstance(done, ToolMessage)
    again = chat_model(served).bind_tools([MOVE]).invoke([HumanMessage(PROMPT), answer, done])
    assert isinstance(again, AIMessage)


def tools_streamed(served: Served) -> None:
    bound = chat_model(served, max_tokens=300).bind_tools([MOVE], tool_choice="move", strict=True)
    parts = list(bound.stream(PROMPT))
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.tool_calls[0]["args"]["direction"] in ("left", "right")


def structured_by_schema(served: Served) -> None:
    model = chat_model(served, max_tokens=200).with_structured_output(Animal, method="json_schema")
    assert isinstance(model.invoke(PROMPT), Animal)


def structured_by_call(served: Served) -> None:
    model = chat_model(served, max_tokens=300).with_structured_output(Animal, method="function_calling", strict=True)
    assert isinstance(model.invoke(PROMPT), Animal)


def completion(served: Served) -> None:
    model = OpenAI(model=served.model, base_url=served.url, api_key=served.key, max_tokens=4, max_retries=0)
    assert isinstance(model.invoke(PROMPT), str)


def errors(served: Served) -> None:
    try:
        chat_model(served._replace(model="none")).invoke(PROMPT)
    except openai.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


if __name__ == "__main__":
    tour(
        "langchain-openai",
        invoke,
        stream,
        batch,
        tools,
        tools_streamed,
        structured_by_schema,
        structured_by_call,
        completion,
        errors,
    )
