"""What `disagg profile` was asked: its own flags."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Beside what the model is computed with."""

    out: Annotated[Path, typer.Option(help="Where the profile goes, as JSON.")] = Path("profile.json")
    hardware: Annotated[str, typer.Option(help="What to call this hardware. Default: the processor or --device.")] = ""
    repeats: Annotated[int, typer.Option(help="Steps of each shape that count; their median is taken.")] = 7
    max_prompt: Annotated[int, typer.Option(help="Most prompt tokens of one step.")] = 1024
    max_streams: Annotated[int, typer.Option(help="Most streams of one step.")] = 32
    limit_s: Annotated[float, typer.Option(help="Seconds after which no round of all shapes is begun.")] = 120.0
    served_rounds: Annotated[
        int, typer.Option(help="Also serve it by two workers and time so many rounds of steady loads; 0: only steps.")
    ] = 0
