"""Whole-step fits that others have published, shipped as data."""

import functools
import importlib.resources
import tomllib

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.fitted import CoefficientModel, StepCoefficients
from disagg.sim.hardware.precision import Precision


class PublishedFit(msgspec.Struct, frozen=True):
    """Of one model, engine and number of devices that share each layer."""

    model: str
    accelerator: str
    engine: str
    tp: int
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    large_batch: int
    kv_tokens: dict[str, int]  # "pp1", "pp2": tokens that fit with so many stages
    source: str

    @property
    def coefficients(self) -> StepCoefficients:
        return StepCoefficients(self.prefill, self.decode, self.decode_large, self.large_batch)


@functools.cache
def published_fits() -> tuple[PublishedFit, ...]:
    text = (importlib.resources.files("disagg.sim.hardware") / "data" / "coefficients.toml").read_text()
    return tuple(msgspec.convert(tomllib.loads(text)["fit"], list[PublishedFit]))


def published_model(model: str, *, engine: str = "DistServe", tp: int = 1, pp: int = 1) -> CoefficientModel:
    """A worker by its published fit. Raises ConfigurationError where there is none."""
    shape = catalogue.model_shape(model)
    for fit in published_fits():
        if (fit.model, fit.engine.lower(), fit.tp) == (shape.name, engine.lower(), tp):
            kv_tokens = fit.kv_tokens.get(f"pp{pp}")
            if kv_tokens is None:
                raise ConfigurationError(
                    f"the fit of {shape.name} with tp={tp} knows no pp={pp}; known: {', '.join(fit.kv_tokens)}"
                )
            return CoefficientModel(
                f"{shape.name} on {fit.accelerator} TP{tp} PP{pp} ({fit.engine}'s fit)",
                fit.coefficients,
                kv_bytes_per_token=shape.kv_bytes_per_token(Precision.FP16),
                num_layers=shape.num_layers,
                kv_tokens=kv_tokens,
                pp=pp,
                stage_s=1e-3 if pp > 1 else 0.0,
                mixes_steps=False,  # neither DistServe nor the vLLM of 2023, whose steps these are, did
            )
    known = sorted(f"{fit.model} {fit.engine} tp={fit.tp}" for fit in published_fits())
    raise ConfigurationError(f"no published fit of {model} by {engine} with tp={tp}; known: {', '.join(known)}")
