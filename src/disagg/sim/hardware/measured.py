"""Step times from tables that somebody measured."""

import csv
from collections.abc import Iterable
from pathlib import Path

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.interpolation import Outside, Surface
from disagg.sim.hardware.step_model import StepShape


class MeasuredPoint(msgspec.Struct, frozen=True):
    """One step that was timed: a batch of prompts (prompt_tokens > 0) or of streams."""

    seconds: float
    prompt_tokens: int = 0  # computed in the step, of all prompts together
    cached_tokens: int = 0  # that each of them attends to beside
    num_streams: int = 0
    context: int = 0  # tokens that each stream attends to


class MeasuredCard(msgspec.Struct, frozen=True):
    """What a table says beside its points."""

    name: str
    kv_bytes_per_token: int
    num_layers: int
    kv_tokens: int  # that fit beside the weights


class MeasuredTable:
    """Linear between points. A step with both phases takes the sum of both: as if they ran one after the other."""

    def __init__(
        self, card: MeasuredCard, points: Iterable[MeasuredPoint], *, outside: Outside = Outside.EXTEND
    ) -> None:
        """Raises ConfigurationError for a table with neither prompts nor streams or with times that cannot be."""
        kept = list(points)
        for index, point in enumerate(kept):
            if point.seconds <= 0 or (point.prompt_tokens > 0) == (point.num_streams > 0):
                raise ConfigurationError(
                    f"point {index + 1} of {card.name} is {point}: seconds must be more than 0 and exactly one of "
                    "prompt_tokens and num_streams"
                )
        self.card = card
        prompts = [(p.cached_tokens, p.prompt_tokens, p.seconds) for p in kept if p.prompt_tokens]
        streams = [(p.context, p.num_streams, p.seconds) for p in kept if p.num_streams]
        if not prompts and not streams:
            raise ConfigurationError(f"{card.name} has no points; a table needs steps of prompts, of streams, or both")
        self._prompts = Surface(prompts, f"prompt tokens of {card.name}", outside) if prompts else None
        self._streams = Surface(streams, f"streams of {card.name}", outside) if streams else None

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def kv_bytes_per_token(self) -> int:
        return self.card.kv_bytes_per_token

    @property
    def num_layers(self) -> int:
        return self.card.num_layers

    def max_kv_tokens(self, block_size: int) -> int:
        """See StepModel."""
        return self.card.kv_tokens // block_size * block_size

    def step_s(self, shape: StepShape) -> float:
        """See StepModel. Raises ConfigurationError for a phase that was not measured."""
        seconds = 0.0
        if shape.prefill:
            if self._prompts is None:
                raise ConfigurationError(f"{self.name} has no measured prompts; add some or use it for decode only")
            tokens = shape.num_prompt_tokens
            # Of unlike prompts, what each token finds in the cache counts.
            cached = sum(new * cached for new, cached in shape.prefill) / tokens if tokens else 0.0
            seconds += self._prompts.at(tokens, cached)
        if shape.num_decode:
            if self._streams is None:
                raise ConfigurationError(f"{self.name} has no measured streams; add some or use it for prefill only")
            seconds += self._streams.at(shape.num_decode, shape.decode_contexts_sum / shape.num_decode)
        return seconds


def read_points(path: Path) -> list[MeasuredPoint]:
    """From CSV with the names of MeasuredPoint as header, or a JSON list of objects with them; seconds as seconds.

    Raises ConfigurationError, with the line.
    """
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=list[MeasuredPoint])
        with path.open(newline="") as stream:
            reader = csv.DictReader(stream)
            return [_point(row, f"line {reader.line_num} of {path}") for row in reader]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a table of measured steps: {error}") from error


def _point(row: dict[str, str], where: str) -> MeasuredPoint:
    try:
        return msgspec.convert({key: value for key, value in row.items() if value}, MeasuredPoint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where} is not a measured step: {error}") from error
