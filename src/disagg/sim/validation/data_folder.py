"""Where measured tables lie that are too large or not ours to ship."""

import csv
import os
from pathlib import Path

VARIABLE = "DISAGG_VALIDATION_DATA"


def data_folder() -> Path | None:
    """The folder named by DISAGG_VALIDATION_DATA, else shared/validation/data beside the checkout; None: neither."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) if Path(named).is_dir() else None
    beside = Path(__file__).parents[4].parent / "shared" / "validation" / "data"
    return beside if beside.is_dir() else None


def absent_reason(file: str) -> str | None:
    """Why `file` cannot be read, or None if it is there."""
    folder = data_folder()
    if folder is None:
        return f"no data folder; set {VARIABLE} to one that holds {file}"
    return None if (folder / file).is_file() else f"{folder} holds no {file}"


def read_rows(file: str) -> list[dict[str, str]]:
    """Rows of a CSV file of the folder. Raises FileNotFoundError; ask absent_reason first."""
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError(absent_reason(file))
    with (folder / file).open(newline="") as stream:
        return list(csv.DictReader(stream))
