"""What `disagg profile` was asked, between its command line and its work."""

from pathlib import Path
from typing import NamedTuple


class ProfileOptions(NamedTuple):
    """hardware: empty for the processor's name or the device's."""

    out: Path
    hardware: str
    repeats: int
    max_prompt: int  # tokens of one step
    max_streams: int
    limit_s: float  # after which no round is begun
    served_rounds: int = 0  # of loads on the model served here; 0: only the engine is timed
