"""pydantic-ai: agents whose answers are checked types, by a call or by a schema, and calls over several turns."""

from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from tests.conformance.tours.report import Animal, Served, tour

PROMPT = "the quick brown fox"


def agent(served: Served, **more: Any) -> Any:
    provider = OpenAIProvider(base_url=served.url, api_key=served.key)
    settings = {"max_tokens": 300, "temperature": 0.0}
    return Agent(OpenAIChatModel(served.model, provider=provider), model_settings=settings, **more)


def text(served: Served) -> None:
    result = agent(served).run_sync(PROMPT, model_settings={"max_tokens": 8})
    assert result.usage.output_tokens > 0


def structured_by_call(served: Served) -> None:
    result = agent(served, output_type=ToolOutput(Animal)).run_sync(PROMPT)
    assert isinstance(result.output, Animal)


def structured_by_schema(served: Served) -> None:
    result = agent(served, output_type=NativeOutput(Animal)).run_sync(PROMPT)
    assert isinstance(result.output, Animal)


def stream(served: Served) -> None:
    result = agent(served, output_type=NativeOutput(Animal)).run_stream_sync(PROMPT)
    assert isinstance(result.get_output(), Animal)


def several_turns(served: Served) -> None:
    first = agent(served, output_type=ToolOutput(Animal)).run_sync(PROMPT)
    second = agent(served, output_type=ToolOutput(Animal)).run_sync(
        "again", message_history=first.all_messages(), usage_limits=UsageLimits(request_limit=3)
    )
    assert isinstance(second.output, Animal)


if __name__ == "__main__":
    tour("pydantic-ai-slim", text, structured_by_call, structured_by_schema, stream, several_turns)
