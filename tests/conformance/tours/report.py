"""What the tours of Python clients share. Run in an environment of their own: nothing of the project is imported here.

A tour is run as `python -m tests.conformance.tours.NAME URL MODEL KEY` and ends with one line of JSON.
"""

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel


class Served(NamedTuple):
    """Whom a tour asks."""

    url: str  # with /v1
    model: str
    key: str


class Animal(BaseModel):
    """What a structured answer is."""

    kind: Literal["cat", "dog"]
    is_tame: bool
    legs: Literal[2, 4]


Check = Callable[[Served], Any]


def tour(package: str, *checks: Check) -> None:
    """Run every check and print {"client", "version", "results": {name: null or what went wrong}}."""
    served = Served(*sys.argv[1:4])
    results: dict[str, str | None] = {}
    for check in checks:
        try:
            assert not inspect.isawaitable(check(served))
            results[check.__name__] = None
        except Exception:
            results[check.__name__] = traceback.format_exc()
    print(json.dumps({"client": package, "version": version(package), "results": results}))
