"""How a process that serves for long uses Python's garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Nothing is searched for cycles meanwhile: nearly all that is made while a process loads, stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_rarely() -> None:
    """What is loaded by now stays, and what a step makes for hundreds of streams goes by itself: searching all of it
    for cycles after every few hundred tokens would cost more than writing them, and stop everybody meanwhile.

    Cycles that loading has left behind, some thousands of objects, stay too: to search for them takes 0.1 s.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
