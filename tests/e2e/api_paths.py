"""One request sent along every path that a prompt can take, and what the answers have in common."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tests.e2e.cluster import SMALL, Front

from disagg.testing.processes import Serve

MODEL = "tiny-llama"
MARKS = ("<think>", "</think>", "<tool_call>")  # each one token of the model with a long context
MAX_OPEN = 24  # requests at once, of that model
START_TIMEOUT_S = 240.0  # a dozen processes at once
# Who stands still for a while is not lost, and whatever comes back in time does so without the end of a lease.
PATIENT = ("--beat-interval-s", "10", "--lease-s", "300")
# "local": the decode worker reads every prompt itself.
PATHS: Mapping[str, tuple[str, ...]] = {
    "mixed": ("--mixed", "1"),
    "disaggregated": ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"),
    "local": ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "100000"),
}

Json = dict[str, Any]


class Reply(NamedTuple):
    """An answer without what differs between any two: ids and times."""

    status: int
    body: Json  # of a whole answer or an error
    events: tuple[Json, ...]  # of a stream

    @property
    def choices(self) -> list[Json]:
        return list(self.body["choices"])

    @property
    def text(self) -> str:
        return str(self.choices[0]["text"])

    @property
    def error(self) -> Json:
        return dict(self.body["error"])

    def streamed(self, index: int = 0) -> list[Json]:
        """The parts of one choice, in order."""
        return [choice for event in self.events for choice in event["choices"] if choice["index"] == index]


class Paths:
    """The three deployments of one model."""

    def __init__(self, fronts: Mapping[str, Front], serves: Mapping[str, Serve] = {}) -> None:
        self.fronts = fronts
        self.serves = serves

    def post(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Reply:
        """Along every path; the answers must be equal."""
        replies = {name: _reply(front.post(body, path)) for name, front in self.fronts.items()}
        first = replies["mixed"]
        for name, reply in replies.items():
            assert reply == first, f"{name} answers otherwise than mixed:\n{reply}\n{first}"
        return first

    def complete(self, prompt: object, **more: Any) -> Reply:
        """A greedy completion that succeeds."""
        reply = self.post(completion(prompt, **more))
        assert reply.status == httpx.codes.OK, reply
        return reply

    def chat(self, content: object, **more: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 6, **more}
        return self.post(body, "/v1/chat/completions")


def completion(prompt: object, **more: Any) -> Json:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}


@contextmanager
def all_paths(model: Path, *more: str) -> Iterator[Paths]:
    """Every deployment, ready, with `more` said to each of them; gone afterwards."""
    serves = {
        name: Serve((str(model), *pools, *SMALL, *PATIENT, *more), ready_timeout_s=START_TIMEOUT_S)
        for name, pools in PATHS.items()
    }
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(serves)) as threads:  # half of a start is waiting
            list(threads.map(stack.enter_context, serves.values()))
        fronts = {name: stack.enter_context(Front(serve.url)) for name, serve in serves.items()}
        yield Paths(fronts, serves)


def _reply(response: httpx.Response) -> Reply:
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, last, rest = response.text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events]
        assert len({event["id"] for event in parsed}) == 1
        return Reply(response.status_code, {}, tuple(_plain(event) for event in parsed))
    return Reply(response.status_code, _plain(response.json()), ())


def _plain(value: Any) -> Any:
    """Calls have ids too."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in ("id", "created")}
    return [_plain(each) for each in value] if isinstance(value, list) else value
