"""Flags that say who goes first reach the processes, and change no token."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.cluster import Answer, Front

from disagg.cluster.plan import PREFILL_NICENESS
from disagg.core.roles import FirstToken
from disagg.testing.processes import Serve

PAIR = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--served-name", "m")
PROMPTS = [[3 + (7 * number + index * index) % 300 for index in range(5 + 23 * number)] for number in range(6)]
CHOICES = {FirstToken.AT_ONCE: (PREFILL_NICENESS, ()), FirstToken.STEADY: (0, ("--prefill-niceness", "0"))}


def priorities(server: Serve) -> list[int]:
    """Of prefill worker, decode worker and router, as the kernel counts."""
    return [os.getpriority(os.PRIO_PROCESS, server.pid_of(name)) for name in ("prefill-0", "decode-0", "router")]


def test_first_tokens_and_priorities(tiny_llama: Path) -> None:
    own, answers = os.getpriority(os.PRIO_PROCESS, 0), list[list[Answer]]()
    for choice, (niceness, flags) in CHOICES.items():
        with (
            Serve((str(tiny_llama), *PAIR, "--first-token", choice.value, *flags)) as server,
            Front(server.url) as front,
            ThreadPoolExecutor(len(PROMPTS)) as threads,
        ):
            assert priorities(server) == [min(own + niceness, 19), own, own]
            asked = [threads.submit(front.complete, "m", prompt, 12) for prompt in PROMPTS]
            answers.append([answer for each in asked for answer in each.result(60.0)])
            front.wait_idle(2)
    assert answers[0] == answers[1]
    assert all(len(answer.tokens) == 12 for answer in answers[0])
