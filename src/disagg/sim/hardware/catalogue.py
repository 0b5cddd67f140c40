"""Accelerators, links, prices and models that come with the package, each value with its source."""

import functools
import importlib.resources
import tomllib
from typing import TypeVar

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.efficiency import Efficiency, EngineOverhead
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision

GB = 1e9
GIB = 2**30

T = TypeVar("T")


class Accelerator(msgspec.Struct, frozen=True):
    """One device. Rates are the maker's, dense and in one direction; efficiency says what is reached of them."""

    name: str
    tflops: dict[Precision, float]  # by width of the operands; 16 bits are always given
    memory_gib: float
    memory_tb_s: float
    link: str  # to the other devices of its node, an entry of links()
    efficiency: str
    source: str
    tdp_w: float = 0.0  # 0: not known
    aliases: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()  # fields that rest on memory alone

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def memory_bytes_s(self) -> float:
        return self.memory_tb_s * 1e12

    def flops_s(self, weights: Precision) -> float:
        """Peak for weights of this width; where the device has no such unit, weights are widened to 16 bits."""
        if weights is Precision.FP32:
            return self.tflops[Precision.BF16] * 1e12 / 2  # as TF32
        unit = Precision.FP8 if weights is Precision.FP8_BLOCK else weights
        return self.tflops.get(unit, self.tflops[Precision.BF16]) * 1e12


class Link(msgspec.Struct, frozen=True):
    """One direction between two devices or two nodes."""

    name: str
    kind: str  # nvlink, pcie, ib, roce, tcp, wan
    gb_s: float  # promised
    efficiency: float  # share of it that large transfers reach
    latency_us: float  # before the first byte
    source: str
    num_devices: int = 1  # that share it: all of a node where it is the node's ports together
    aliases: tuple[str, ...] = ()

    @property
    def bytes_s(self) -> float:
        """What large transfers reach."""
        return self.gb_s * GB * self.efficiency

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds for one transfer that has the link to itself."""
        return self.latency_s + num_bytes / self.bytes_s


class Price(msgspec.Struct, frozen=True):
    """Of one device for one hour."""

    accelerator: str
    usd_per_hour: float
    date: str
    source: str


class KnownModel(msgspec.Struct, frozen=True):
    """A model whose config.json is known."""

    name: str
    num_parameters: int  # in the publisher's files
    config: dict[str, object]
    aliases: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config, self.name)


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
    return _read("accelerators.toml", "accelerator", Accelerator)


@functools.cache
def links() -> tuple[Link, ...]:
    return _read("links.toml", "link", Link)


@functools.cache
def prices() -> tuple[Price, ...]:
    return _read("prices.toml", "price", Price)


@functools.cache
def models() -> tuple[KnownModel, ...]:
    return _read("models.toml", "model", KnownModel)


@functools.cache
def efficiencies() -> tuple[Efficiency, ...]:
    return _read("efficiency.toml", "efficiency", Efficiency)


@functools.cache
def engines() -> tuple[EngineOverhead, ...]:
    return _read("engines.toml", "engine", EngineOverhead)


def accelerator(name: str) -> Accelerator:
    """By name or alias, in any case. Raises ConfigurationError."""
    return _find("accelerator", name, {item.name: (item, item.aliases) for item in accelerators()})


def link(name: str) -> Link:
    """By name, in any case. Raises ConfigurationError."""
    return _find("link", name, {item.name: (item, item.aliases) for item in links()})


def efficiency(name: str) -> Efficiency:
    """By name. Raises ConfigurationError."""
    return _find("efficiency", name, {item.name: (item, ()) for item in efficiencies()})


def engine(name: str) -> EngineOverhead:
    """By name, in any case. Raises ConfigurationError."""
    return _find("engine", name, {item.name: (item, ()) for item in engines()})


def model_shape(name: str) -> ModelShape:
    """Of a known model, by name or alias, in any case. Raises ConfigurationError."""
    return _find("model", name, {item.name: (item, item.aliases) for item in models()}).shape


def price(accelerator_name: str) -> Price:
    """The dated default for this device. Raises ConfigurationError where none is known."""
    wanted = accelerator(accelerator_name).name
    return _find("price of", wanted, {item.accelerator: (item, ()) for item in prices()})


def _find(what: str, name: str, known: dict[str, tuple[T, tuple[str, ...]]]) -> T:
    for label, (item, aliases) in known.items():
        if name.lower() in (label.lower(), *(alias.lower() for alias in aliases)):
            return item
    raise ConfigurationError(f"{what} {name!r} is not in the catalogue; known: {', '.join(sorted(known))}")


def _read(file: str, key: str, kind: type[T]) -> tuple[T, ...]:
    content = tomllib.loads((importlib.resources.files("disagg.sim.hardware") / "data" / file).read_text())
    return tuple(msgspec.convert(content[key], list[kind]))  # type: ignore[valid-type]
