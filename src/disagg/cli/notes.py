"""What a command says on the way, on stderr: stdout is for answers."""

import contextlib
import sys


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk costs the line only
        print(f"disagg: {line}", file=sys.stderr, flush=True)
