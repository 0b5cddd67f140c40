"""What may be bought or used: devices by kind, the model on them, the links between. Frozen values."""

from collections.abc import Iterator

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.memory import MemoryBudget
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.roofline import RooflineModel

TP_SIZES = (1, 2, 4, 8)
PP_SIZES = (1, 2)


class Gpus(msgspec.Struct, frozen=True):
    """Devices of one kind; what one costs an hour, 0 where nobody said. price_date: of the catalogue's price."""

    device: str
    count: int
    usd_per_hour: float = 0.0
    price_date: str = ""


class Cut(msgspec.Struct, frozen=True, order=True):
    """One worker's devices: tp share each layer, pp groups of them share the layers."""

    device: str
    tp: int
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        stages = f" PP{self.pp}" if self.pp > 1 else ""
        return f"{self.device} TP{self.tp}{stages}"


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """budget_usd_per_hour: 0 for none. link: between any two workers, an entry of the catalogue."""

    model: ModelShape
    gpus: tuple[Gpus, ...]
    budget_usd_per_hour: float = 0.0
    engine: str = "vllm"
    weights: Precision = Precision.BF16
    kv: Precision = Precision.BF16
    link: str = "IB-NDR"
    block_size: int = 128
    gpus_per_node: int = 8
    memory: MemoryBudget = MemoryBudget()

    @property
    def num_gpus(self) -> int:
        return sum(gpus.count for gpus in self.gpus)

    def of(self, device: str) -> Gpus:
        return next(gpus for gpus in self.gpus if gpus.device == device)

    def most(self, cut: Cut, used: dict[str, int]) -> int:
        """How many workers of this cut fit beside devices that are used already."""
        gpus = self.of(cut.device)
        most = (gpus.count - used.get(cut.device, 0)) // cut.num_gpus
        if self.budget_usd_per_hour and gpus.usd_per_hour:
            spent = sum(self.of(device).usd_per_hour * count for device, count in used.items())
            left = self.budget_usd_per_hour - spent
            most = min(most, int(left / gpus.usd_per_hour / cut.num_gpus + 1e-9))
        return max(0, most)

    def without(self, device: str, count: int) -> "Fleet":
        """The same with fewer devices of a kind."""
        gpus = tuple(
            msgspec.structs.replace(each, count=each.count - count) if each.device == device else each
            for each in self.gpus
        )
        return msgspec.structs.replace(self, gpus=gpus)


class Steps:
    """Step-time models of a fleet's cuts, each made once."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._models: dict[Cut, RooflineModel] = {}
        self._overhead = catalogue.engine(fleet.engine)

    def of(self, cut: Cut) -> RooflineModel:
        """Raises ConfigurationError where the model cannot be cut so."""
        if cut not in self._models:
            fleet = self.fleet
            self._models[cut] = RooflineModel(
                fleet.model,
                catalogue.accelerator(cut.device),
                tp=cut.tp,
                pp=cut.pp,
                weights=fleet.weights,
                kv=fleet.kv,
                overhead=self._overhead,
                budget=fleet.memory,
            )
        return self._models[cut]

    def kv_tokens(self, cut: Cut) -> int:
        """0 where not even the weights fit."""
        try:
            return self.of(cut).max_kv_tokens(self.fleet.block_size)
        except ConfigurationError:
            return 0

    def cuts(self) -> tuple[Cut, ...]:
        """Those that fit. Raises ConfigurationError, with the missing gigabytes, where none does."""
        possible = tuple(self._possible())
        fitting = tuple(cut for cut in possible if self.kv_tokens(cut))
        if not fitting:
            if not possible:
                names = ", ".join(f"{gpus.count} x {gpus.device}" for gpus in self.fleet.gpus)
                raise ConfigurationError(f"{names}: no worker can be made of them; give 1 device or more")
            largest = max(possible, key=lambda cut: (cut.num_gpus, -self.of(cut).weight_bytes_per_rank()))
            self.of(largest).max_kv_tokens(self.fleet.block_size)  # says by how much
        return fitting

    def _possible(self) -> Iterator[Cut]:
        for gpus in self.fleet.gpus:
            for tp in TP_SIZES:
                for pp in PP_SIZES:
                    cut = Cut(gpus.device, tp, pp)
                    if tp <= self.fleet.gpus_per_node and self.fleet.most(cut, {}):
                        try:
                            self.of(cut)
                        except ConfigurationError:
                            continue  # heads or layers cannot be shared so
                        yield cut


def make_gpus(device: str, count: int, usd_per_hour: float = 0.0) -> Gpus:
    """Under the catalogue's name; the dated default price where none is given. Raises ConfigurationError."""
    name = catalogue.accelerator(device).name
    if count < 1:
        raise ConfigurationError(f"{count} x {name}: there must be 1 or more")
    if usd_per_hour < 0:
        raise ConfigurationError(f"{name} at {usd_per_hour:g} dollars an hour: give 0 or more")
    if not usd_per_hour:
        for price in catalogue.prices():
            if price.accelerator == name:
                return Gpus(name, count, price.usd_per_hour, price.date)
    return Gpus(name, count, usd_per_hour)
