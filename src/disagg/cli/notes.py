"""Plain lines for whoever typed a command."""

import contextlib
import sys


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk costs the line only
        print(f"disagg: {line}", file=sys.stderr, flush=True)
