"""Flags of `disagg bench` that would say nothing, or cannot be, are refused; those of a scenario hold."""

import math
import random
from pathlib import Path

import msgspec
import pytest

from disagg.bench.workload import ClosedWork, SessionWork
from disagg.cli.bench_flags import check_flags
from disagg.cli.bench_options import LoadOptions
from disagg.cli.bench_run import plan_of
from disagg.core.errors import ConfigurationError

URL = "http://127.0.0.1:9"
BY_RATE = LoadOptions(target=URL, rate=1.0)
CHAT = LoadOptions(target=URL, scenario="chat")
SERVED = LoadOptions(target="rag")
TRACE = LoadOptions(target=URL, trace="t.jsonl")


@pytest.mark.parametrize(
    ("asked", "more", "said"),
    [
        (TRACE, {"rate": 2.0}, "--rate says nothing beside --trace: leave out one or the other"),
        (TRACE, {"clients": 2, "prompt_tokens": 9}, "--prompt-tokens and --clients say nothing beside --trace"),
        (TRACE, {"scenario": "rag"}, "--scenario says nothing beside --trace"),
        (BY_RATE, {"length_scale": 0.5}, "--length-scale says nothing without --trace: give both or neither"),
        (BY_RATE, {"clients": 4}, "--rate says nothing beside --clients"),
        (BY_RATE, {"cv": 2.0}, "--cv says nothing without --arrivals gamma"),
        (BY_RATE, {"think_s": 2.0}, "--think-s says nothing without --clients"),
        (BY_RATE, {"prefixes": 2}, "--prefixes says nothing without --prefix-tokens"),
        (BY_RATE, {"prefix_tokens": 2}, "--prefix-tokens says nothing without --prefixes"),
        (BY_RATE, {"search_runs": 3}, "--search-runs says nothing without --search"),
        (BY_RATE, {"tokenizer": "m"}, "--tokenizer says nothing without --api ids"),
        (BY_RATE, {"prefill": 2}, "--prefill says nothing beside a URL"),
        (CHAT, {"output_tokens": 7}, "--output-tokens says nothing beside a scenario"),
        (CHAT, {"arrivals": "gamma"}, "--arrivals says nothing beside a scenario"),
        (SERVED, {"scenario": "chat"}, "--scenario says nothing beside a scenario that is served here"),
        (SERVED, {"mixed": 2, "decode": 2}, "--decode says nothing beside --mixed"),
        (BY_RATE, {"requests": -1}, "--requests is -1: it must be at least 0"),
        (BY_RATE, {"prefixes": -1}, "--prefixes is -1: it must be at least 0"),
        (BY_RATE, {"spread": float("nan")}, "--spread is nan: it must be at least 0"),
        (BY_RATE, {"output_tokens": 0}, "--output-tokens is 0: it must be at least 1"),
        (BY_RATE, {"timeout_s": 0.0}, "--timeout-s is 0: it must be above 0"),
    ],
)
def test_what_would_say_nothing_or_cannot_be_is_refused(asked: LoadOptions, more: dict[str, object], said: str) -> None:
    check_flags(asked)
    with pytest.raises(ConfigurationError) as caught:
        check_flags(msgspec.structs.replace(asked, **more))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (msgspec.structs.replace(BY_RATE, warm_up=100), "--warm-up 100 of 100 requests leaves none that count"),
        (msgspec.structs.replace(CHAT, api="ids"), "needs the answer's text: ask with --api chat or text"),
    ],
)
def test_what_does_not_fit_is_said_before_anybody_is_asked(asked: LoadOptions, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan_of(asked)
    assert said in str(caught.value)


def test_clients_of_a_scenario_are_a_closed_loop_also_of_conversations() -> None:
    plan = plan_of(msgspec.structs.replace(CHAT, clients=3, think_s=0.5))
    assert isinstance(plan.workload, SessionWork)
    assert (plan.workload.num_clients, plan.workload.think_s) == (3, 0.5)
    stream = plan.workload.start(random.Random(1))
    first = list(iter(stream.next_request, None))
    assert [request.due_s for request in first] == [0.0] * 3
    rag = plan_of(msgspec.structs.replace(SERVED, clients=2))
    assert isinstance(rag.workload, ClosedWork)
    assert rag.workload.num_clients == 2


def test_a_scenario_that_is_a_closed_loop_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "rate_per_s = 1.0\nnum_requests = 3\nnum_clients = 2\nprompt = { mean = 3 }\noutput = { mean = 1 }\n"
    )
    plan = plan_of(LoadOptions(target=str(path)))
    assert math.isnan(plan.rate_per_s)
    with pytest.raises(ConfigurationError, match="closed loop of 2 clients"):
        plan_of(LoadOptions(target=str(path), rate=2.0))


@pytest.mark.parametrize("line", ["rate_per_s = 0.0", "num_requests = 0", "think_s = -1.0", "num_clients = -1"])
def test_a_scenario_that_cannot_be_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.toml"
    fields = {"rate_per_s": "1.0", "num_requests": "3"}
    name, _, value = line.partition(" = ")
    lines = [f"{key} = {text}" for key, text in (fields | {name: value}).items()]
    path.write_text("\n".join([*lines, "prompt = { mean = 3 }", "output = { mean = 1 }"]))
    with pytest.raises(ConfigurationError, match=r"mine\.toml: .* must be above 0"):
        plan_of(LoadOptions(target=str(path)))
