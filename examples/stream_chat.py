"""Stream a chat answer with the official client. Start a server first: make serve

usage: python examples/stream_chat.py [BASE_URL] [MODEL]        (needs: pip install openai)
"""

import sys

from openai import OpenAI


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    model = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
    client = OpenAI(base_url=base_url, api_key="-")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
        max_tokens=80,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} written]")


if __name__ == "__main__":
    main()
