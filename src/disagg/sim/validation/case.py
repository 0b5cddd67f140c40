"""Published experiments as data: what was measured, under which conditions, and how near we must come."""

import enum
import importlib.resources
import tomllib

import msgspec


class Use(enum.StrEnum):
    """What a case may be used for."""

    EXACT = "exact"  # a golden value: our code must reproduce somebody's arithmetic
    CALIBRATE = "calibrate"  # something was fitted to it: it shows the fit, not a prediction
    VALIDATE = "validate"  # nothing was fitted to it
    HELD_BACK = "held-back"  # as validate, and not looked at while the model was made


class Scope(enum.StrEnum):
    """What must be within the tolerance."""

    EACH = "each"  # every value
    MEAN = "mean"  # the mean of the relative errors
    POINTS = "points"  # the difference of every value, in its own unit (percent points)


class Check(msgspec.Struct, frozen=True):
    """One row of a case: values at some conditions."""

    metric: str
    unit: str
    published: tuple[float, ...]
    tolerance: float  # a share, or with Scope.POINTS a difference
    at: tuple[float, ...] = ()  # what varies: tokens, streams, rate
    scope: Scope = Scope.EACH
    known_miss: str = ""  # why it is missed; a miss without a reason fails the run
    missed_by: float = 0.0  # the error that is known, rounded up; more fails the run


class Case(msgspec.Struct, frozen=True):
    """An experiment that somebody else ran."""

    id: str
    title: str
    use: Use
    source: str
    checks: tuple[Check, ...]
    data: tuple[str, ...] = ()  # files of the data folder it cannot do without


def cases() -> tuple[Case, ...]:
    """All that are shipped."""
    text = (importlib.resources.files("disagg.sim.validation") / "cases.toml").read_text()
    return tuple(msgspec.convert(tomllib.loads(text)["case"], list[Case]))
