"""Which engines are compared, and how precise each is.

An engine may be compared with one of ours when its weights and arithmetic are at least as precise.
"""

import enum
import sys
from pathlib import Path

import msgspec

from disagg.core.formats import KvDtype, Weights
from peers.environments import (
    LLAMACPP_NATIVE,
    LLAMACPP_PREBUILT,
    OPENVINO,
    Environment,
    Unavailable,
    python_of,
)
from peers.models import model_for

OURS = "disagg"


class Precision(enum.IntEnum):
    """Of weights and arithmetic, the coarser of the two."""

    INT8 = 1
    BF16 = 2
    FP16 = 3
    FP32 = 4


# Our ways of storing weights: how precise, and with which KV they are measured.
OUR_KINDS = {
    Weights.FP32: (Precision.FP32, KvDtype.FLOAT32),
    Weights.FP16: (Precision.FP16, KvDtype.FLOAT16),
    Weights.INT8: (Precision.INT8, KvDtype.FLOAT16),
}


class Entry(msgspec.Struct, frozen=True):
    """One row of the table. environments: the first that can be had; none: our own."""

    family: str
    kind: str  # the rest of its name
    precision: Precision
    runner: str  # file beside this one
    form: str  # of the model
    environments: tuple[Environment, ...] = ()
    argument: str = ""  # the runner's --kind; "{package}" stands for the environment's first package

    @property
    def name(self) -> str:
        return f"{self.family}-{self.kind}"


class Command(msgspec.Struct, frozen=True):
    """An engine that can be started."""

    entry: Entry
    arguments: tuple[str, ...]  # all but --threads


def _llamacpp(family: str, *environments: Environment) -> tuple[Entry, ...]:
    forms = {"F32": Precision.FP32, "F16": Precision.FP16, "Q8_0": Precision.INT8}
    return tuple(
        Entry(family, form, precision, "run_llamacpp.py", form, environments, "{package}")
        for form, precision in forms.items()
    )


def _openvino(kind: str, precision: Precision, form: str, hints: str) -> Entry:
    return Entry("openvino", kind, precision, "run_openvino.py", form, (OPENVINO,), hints)


PEERS: tuple[Entry, ...] = (
    Entry("transformers", "fp32", Precision.FP32, "run_transformers.py", "hf-fp32", (), "float32"),
    *_llamacpp("llamacpp", LLAMACPP_NATIVE, LLAMACPP_PREBUILT),
    *_llamacpp("xllamacpp", LLAMACPP_PREBUILT),
    _openvino("fp32", Precision.FP32, "openvino-fp32", "f32:f32"),
    _openvino("fp16", Precision.FP16, "openvino-fp16", "f32:f16"),
    _openvino("bf16", Precision.BF16, "openvino-fp16", "bf16:bf16"),
    _openvino("int8", Precision.INT8, "openvino-int8", "f32:u8"),
)
DEFAULT_PEERS = "transformers,llamacpp,openvino-fp32,openvino-bf16,openvino-int8"


def our_entries() -> list[Entry]:
    """One for each way of storing weights. Raises KeyError for one whose precision nobody wrote down."""
    entries: list[Entry] = []
    for weights in Weights:
        precision, kv_dtype = OUR_KINDS[weights]
        entries.append(Entry(OURS, weights.value, precision, "run_disagg.py", "own", (), f"{weights}:{kv_dtype}"))
    return entries


def chosen_peers(names: str) -> list[Entry]:
    """Entries by comma-separated names or families. Raises SystemExit for an unknown one."""
    wanted = [name for name in names.split(",") if name]
    known = {entry.name for entry in PEERS} | {entry.family for entry in PEERS}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"unknown peers {unknown}; there are {', '.join(sorted(known))}")
    return [entry for entry in PEERS if entry.name in wanted or entry.family in wanted]


def command_of(entry: Entry, model: Path) -> Command:
    """How to start it; environment and model are made when they are missing. Raises Unavailable."""
    python, package = Path(sys.executable), ""
    reasons: list[str] = []
    for environment in entry.environments:
        try:
            python, package = python_of(environment), environment.requirements[0].partition("==")[0]
            break
        except Unavailable as error:
            reasons.append(str(error))
    else:
        if reasons:
            raise Unavailable("; ".join(reasons))
    runner = Path(__file__).with_name(entry.runner)
    kind = entry.argument.replace("{package}", package)
    path = model_for(entry.form, model)
    return Command(entry, (str(python), str(runner), "--model", str(path), "--kind", kind))
