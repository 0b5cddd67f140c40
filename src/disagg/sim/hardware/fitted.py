"""Step times from coefficients: those of a live worker, and those that others have published."""

from pathlib import Path

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.policy.step_time import StepCosts
from disagg.policy.step_time import StepShape as LearnedShape
from disagg.sim.hardware.serving import Serving
from disagg.sim.hardware.step_model import StepShape


class ProfileCell(msgspec.Struct, frozen=True):
    """One shape that was run: median seconds and what the fit says."""

    shape: StepShape
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """fitted / measured - 1."""
        return self.fitted_s / self.measured_s - 1


class Profile(msgspec.Struct, frozen=True):
    """What `disagg profile` writes. serving: None where only the engine was timed."""

    model: str
    hardware: str
    weights: str
    kv_dtype: str
    num_layers: int
    kv_bytes_per_token: int
    kv_tokens: int
    costs: StepCosts
    cells: tuple[ProfileCell, ...] = ()
    serving: Serving | None = None

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Raises ConfigurationError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{path} is not a profile: {error}; write one with `disagg profile`") from error

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


class FittedModel:
    """A worker that was profiled: as it was served, where it was."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._costs = profile.costs if profile.serving is None else profile.serving.costs
        self._prompt_step_s = 0.0 if profile.serving is None else profile.serving.prompt_step_s

    @property
    def name(self) -> str:
        return f"{self.profile.model} {self.profile.weights} on {self.profile.hardware} (profiled)"

    @property
    def kv_bytes_per_token(self) -> int:
        return self.profile.kv_bytes_per_token

    @property
    def num_layers(self) -> int:
        return self.profile.num_layers

    def max_kv_tokens(self, block_size: int) -> int:
        """See StepModel."""
        return self.profile.kv_tokens // block_size * block_size

    def step_s(self, shape: StepShape) -> float:
        """See StepModel."""
        if not shape.num_tokens:
            return 0.0
        seconds = self._costs.predict(learned_shape(shape))
        if not shape.prefill or not self._prompt_step_s:
            return seconds
        streams = StepShape((), shape.decode_contexts_sum, shape.num_decode)
        return max(seconds + self._prompt_step_s, self.step_s(streams))


def learned_shape(shape: StepShape) -> LearnedShape:
    """As a worker's own predictor sees it."""
    return LearnedShape(shape.num_prompt_tokens, shape.prompt_pairs, shape.num_decode, shape.decode_contexts_sum)


class StepCoefficients(msgspec.Struct, frozen=True):
    """Published fits of one model on one group of devices; milliseconds.

    prefill: a + b x sum of lengths + c x sum of squared lengths; decode: a + b x sum of contexts + c x streams, with
    other values from large_batch streams on.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    large_batch: int

    def prefill_ms(self, total: float, total_squared: float) -> float:
        base, per_token, per_square = self.prefill
        return base + per_token * total + per_square * total_squared

    def decode_of(self, num_streams: float) -> tuple[float, float, float]:
        return self.decode if num_streams < self.large_batch else self.decode_large

    def decode_ms(self, contexts: float, num_streams: float) -> float:
        base, per_context, per_stream = self.decode_of(num_streams)
        return base + per_context * contexts + per_stream * num_streams


class CoefficientModel:
    """A published fit as a worker. Falls by the fit's own jump where streams reach large_batch."""

    def __init__(
        self,
        name: str,
        coefficients: StepCoefficients,
        *,
        kv_bytes_per_token: int,
        num_layers: int,
        kv_tokens: int,
        pp: int = 1,
        stage_s: float = 0.0,
        mixes_steps: bool = True,
    ) -> None:
        """pp: stages, each with an even share of the times; stage_s: what each adds to a prompt's step.

        mixes_steps: whether the engine computes prompts and streams in one step; else a step of both is two of its own.
        """
        if pp < 1:
            raise ConfigurationError(f"pp={pp} of {name} must be at least 1")
        self.name = name
        self.coefficients = coefficients
        self.kv_bytes_per_token = kv_bytes_per_token
        self.num_layers = num_layers
        self.kv_tokens = kv_tokens
        self.pp = pp
        self.stage_s = stage_s
        self.mixes_steps = mixes_steps

    def max_kv_tokens(self, block_size: int) -> int:
        """See StepModel."""
        return self.kv_tokens // block_size * block_size

    def step_s(self, shape: StepShape) -> float:
        """Both phases in one step pay only the larger of their two constants, where the engine mixes them.

        With stages, streams go round in pp batches; prompts pass the stages one after the other, undivided. Tokens
        that are cached count as if computed in the squares only.
        """
        milliseconds, constants = 0.0, []
        if shape.prefill:
            # (new + cached)^2 - cached^2 is what new tokens attend to, as the squares count it.
            squares = sum(new * (new + 2 * cached) for new, cached in shape.prefill)
            milliseconds += self.coefficients.prefill_ms(shape.num_prompt_tokens, squares)
            milliseconds += 1e3 * self.stage_s * self.pp
            constants.append(self.coefficients.prefill[0])
        if shape.num_decode:
            milliseconds += self.coefficients.decode_ms(shape.decode_contexts_sum / self.pp, shape.num_decode / self.pp)
            constants.append(self.coefficients.decode[0])
        return (milliseconds - (min(constants) if self.mixes_steps and len(constants) == 2 else 0.0)) / 1e3


class _ForeignFit(msgspec.Struct, frozen=True):
    prefill: tuple[float, float, float]
    decoding_smallbs: tuple[float, float, float]
    decoding_largebs: tuple[float, float, float]
    decoding_large_small_bs_threshold: int


def read_coefficients(path: Path) -> dict[tuple[str, int], StepCoefficients]:
    """(model, tp) -> fit, from DistServe's JSON layout. Raises ConfigurationError."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, _ForeignFit]])
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} holds no step coefficients: {error}") from error
    return {
        (model, int(tp)): StepCoefficients(
            fit.prefill, fit.decoding_smallbs, fit.decoding_largebs, fit.decoding_large_small_bs_threshold
        )
        for model, by_tp in content.items()
        for tp, fit in by_tp.items()
    }
