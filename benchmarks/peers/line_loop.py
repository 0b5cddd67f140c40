"""What every runner shares: one JSON line in, one JSON line out.

Standard library only: runners live in foreign environments.

    out  {"engine": ..., "version": ..., "precision": ..., "kv": ..., "weight_bytes": ..., "note": ...}   when ready
    in   {"cell": "contexts", "tokens": [[ids] x 16]}             prompts that decode cells go on from
    in   {"cell": "prefill", "tokens": [[ids]]}                   read one prompt, choose one token
    in   {"cell": "decode", "batch": B, "context": C, "steps": N} one untimed step, then N timed ones of B rows
    in   {"cell": "quality", "tokens": [[ids] x S], "path": P}    scores of every place to P, float32 [S, length, vocab]
    out  {"seconds": ...} or {"error": ...}                       one line for each line in

Lines come by stdin and go to a descriptor of their own, so what an engine prints spoils nothing. The end of stdin ends
the runner. Whoever starts it has pinned it to its cores and set the usual thread variables.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Tokens = list[list[int]]


class Options(NamedTuple):
    """What a runner is told."""

    model: str  # file or folder, in the format the engine reads
    kind: str  # precision, in the engine's own words
    threads: int


class Hello(NamedTuple):
    """What an engine says of itself. weight_bytes: what one decode step reads."""

    engine: str
    version: str
    precision: str
    kv: str
    weight_bytes: int
    note: str


class Runner(Protocol):
    """One engine, loaded. Its cells are methods that return seconds; one it lacks is answered by an error."""

    def hello(self) -> Hello: ...


def run(description: str | None, open_engine: Callable[[Options], Runner]) -> None:
    """The whole life of a runner."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", default="")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--answers-fd", type=int, default=1)
    args = parser.parse_args()
    engine = open_engine(Options(args.model, args.kind, args.threads))
    with os.fdopen(args.answers_fd, "w") as answers:
        print(json.dumps(engine.hello()._asdict()), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(engine, json.loads(line))), file=answers, flush=True)


def _answer(engine: Runner, request: dict[str, object]) -> dict[str, object]:
    cell = str(request.pop("cell"))
    if cell not in ("contexts", "prefill", "decode", "quality"):
        return {"error": f"cell {cell!r} is unknown"}
    try:
        return {"seconds": getattr(engine, cell)(**request)}
    except Exception as error:  # one cell that an engine cannot do must not end the run
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """(seconds, result) of a call."""
    start_s = time.perf_counter()
    result = work()
    return time.perf_counter() - start_s, result
