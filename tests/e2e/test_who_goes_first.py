"""Flags that say who goes first reach the processes, and change no token."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.api_paths import MODEL, PATHS, Paths
from tests.e2e.cluster import Answer, Front

from disagg.cli.worker_flags import DEFAULTS
from disagg.cluster.plan import PREFILL_NICENESS
from disagg.core.roles import FirstToken
from disagg.testing.processes import Serve

PROMPTS = [[4 + (7 * number + index * index) % 300 for index in range(5 + 23 * number)] for number in range(6)]
STEADY = ("--first-token", FirstToken.STEADY.value)
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("plain paths")]


def priorities(server: Serve) -> list[int]:
    """Of prefill worker, decode worker and router, as the kernel counts."""
    return [os.getpriority(os.PRIO_PROCESS, server.pid_of(name)) for name in ("prefill-0", "decode-0", "router")]


def ask(server: Serve) -> list[Answer]:
    with Front(server.url) as front, ThreadPoolExecutor(len(PROMPTS)) as threads:
        asked = [threads.submit(front.complete, MODEL, prompt, 12) for prompt in PROMPTS]
        answers = [answer for each in asked for answer in each.result(60.0)]
        front.wait_idle(2)
    assert all(len(answer.tokens) == 12 for answer in answers)
    return answers


def test_first_tokens_and_priorities(plain_paths: Paths, tiny_llama: Path) -> None:
    own, at_once = os.getpriority(os.PRIO_PROCESS, 0), plain_paths.serves["disaggregated"]
    assert DEFAULTS.first_token is FirstToken.AT_ONCE  # where nothing is said
    assert priorities(at_once) == [min(own + PREFILL_NICENESS, 19), own, own]
    with Serve((str(tiny_llama), *PATHS["disaggregated"], *STEADY, "--prefill-niceness", "0")) as steady:
        assert priorities(steady) == [own, own, own]
        commands = [line for line in steady.family().values() if " --worker-id " in line]
        assert [" ".join(STEADY) in line for line in commands] == [True, True]
        assert ask(steady) == ask(at_once)
