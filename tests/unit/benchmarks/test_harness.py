"""Whose CPU time is whose: what a benchmark started is its own, also when it has ended."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_time_of_a_child_that_has_ended_is_ours(load_script: Callable[[str], Any]) -> None:
    harness = load_script("harness")
    before = harness.cpu_use()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    after = harness.cpu_use()
    assert after.ours - before.ours >= 0.28  # counted in ticks of 10 ms
    assert after.busy - before.busy >= after.ours - before.ours - 0.05
