"""A scenario as people write it: one TOML file for `disagg simulate`, `plan` and `advise`."""

import tomllib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec

from disagg.bench.arrivals import EvenArrivals, GammaArrivals, PoissonArrivals
from disagg.bench.traces import TraceWork
from disagg.bench.workload import Lengths, PrefixPool, RandomWork, SessionWork, Workload
from disagg.core.errors import ConfigurationError
from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.planner.candidate import network_card, wire_gain
from disagg.planner.estimate import Target
from disagg.planner.fleet import Cut, Fleet, Steps, make_gpus
from disagg.planner.traffic import Traffic, read_traffic
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.measured import MeasuredCard, MeasuredTable, read_points
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.roofline import RooflineModel
from disagg.sim.hardware.serving import Contention, Serving
from disagg.sim.hardware.step_model import StepModel
from disagg.sim.profiled import profiled_worker
from disagg.sim.scenario import (
    MAX_CONTEXT,
    Fidelity,
    Link,
    LinkBreaks,
    Scenario,
    SiteLine,
    Slo,
    WorkerDies,
    WorkerDrains,
    WorkerSlows,
    WorkerSpec,
)
from disagg.worker.config import WorkerConfig

MOST_REQUESTS = 1 << 62


class TrafficTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace, or lengths and a rate; with `turns`, sessions that begin at that rate."""

    trace: str = ""
    format: str = ""
    rate_scale: float = 1.0
    length_scale: float = 1.0
    rate_per_s: float = 0.0
    cv: float = 1.0  # of gaps between arrivals: 1 Poisson, 0 even
    num_requests: int = 0  # or sessions; 0: all of a trace, 1000 of others
    prompt: Lengths | None = None
    output: Lengths | None = None
    prefixes: PrefixPool = PrefixPool()
    turns: Lengths | None = None
    think_s: float = 5.0


class SloTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft_s: float = 2.0
    tpot_s: float = 0.05
    share: float = 0.9


class PoolTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal workers."""

    role: Role
    count: int
    device: str
    model: str = ""  # the scenario's where empty
    table: str = ""  # file of steps that were measured there (`read_points`); where empty the roofline is asked
    ready_after_s: float = 0.0  # workers that are added while the scenario runs
    tp: int = 1
    pp: int = 1
    site: str = ""
    link: str = ""  # the scenario's where empty
    chunk_tokens: int = 8192
    mixed_chunk_tokens: int = 512
    max_running: int = 256
    usd_per_hour: float = 0.0


class HereTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal workers of this project, all on the machine of one profile; their other limits are the defaults."""

    role: Role
    count: int
    profile: str  # what `disagg profile` wrote
    num_blocks: int | None = None
    itl_target_s: float = 0.1


class LineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between two sites, one way."""

    source: str
    target: str
    link: str


class ScenarioFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the file. `folder` is where its paths begin."""

    model: str
    traffic: TrafficTable
    name: str = ""
    slo: SloTable = SloTable()
    pool: tuple[PoolTable, ...] = ()
    here: tuple[HereTable, ...] = ()
    line: tuple[LineTable, ...] = ()
    dies: tuple[WorkerDies, ...] = ()
    breaks: tuple[LinkBreaks, ...] = ()
    drains: tuple[WorkerDrains, ...] = ()
    slows: tuple[WorkerSlows, ...] = ()
    weights: Precision = Precision.BF16
    kv: Precision = Precision.BF16
    kv_wire: KvWire = KvWire.NATIVE
    engine: str = "vllm"
    link: str = "IB-NDR"
    block_size: int = 128
    local_prefill_tokens: int = 0
    fidelity: Fidelity = Fidelity.LARGE
    seed: int = 0
    folder: str = ""


def read_scenario_file(path: Path) -> ScenarioFile:
    """Raises ConfigurationError with the file's name and what is wrong where."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        file = msgspec.convert(content, ScenarioFile)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return msgspec.structs.replace(file, name=file.name or path.stem, folder=str(path.parent))


def load_model(name: str, folder: str = "") -> ModelShape:
    """By name of the catalogue, or from a config.json or its folder. Raises ConfigurationError."""
    path = Path(folder, name)
    if path.is_dir() or path.is_file():
        return ModelShape.from_config(path)
    if path.suffix == ".json" or "/" in name:
        raise ConfigurationError(f"{path}: no such file; give a config.json, its folder, or a name of the catalogue")
    return catalogue.model_shape(name)


def model_path(file: ScenarioFile) -> str:
    """Its model from where we are; a name of the catalogue as it is."""
    path = Path(file.folder, file.model)
    return str(path) if path.exists() else file.model


def models_of(file: ScenarioFile) -> tuple[str, ...]:
    """Of its workers, each once."""
    named = [pool.model or file.model for pool in file.pool]
    return tuple(dict.fromkeys([*named, *(file.model for _ in file.here)]))


def work_of(file: ScenarioFile) -> Workload:
    """Raises ConfigurationError where the traffic is not said in full."""
    table, models = file.traffic, models_of(file)
    if len(models) > 1 and (table.trace or table.turns is not None):
        names = ", ".join(models)
        raise ConfigurationError(f"{file.name}: traces and sessions ask for one model, its pools have {names}")
    if table.trace:
        return TraceWork(
            path=Path(file.folder, table.trace),
            format=table.format,
            rate_scale=table.rate_scale,
            length_scale=table.length_scale,
            num_requests=table.num_requests or MOST_REQUESTS,
        )
    if table.prompt is None or table.output is None or not table.rate_per_s:
        raise ConfigurationError(f"{file.name}: [traffic] needs a trace and its format, or rate_per_s, prompt, output")
    arrivals: PoissonArrivals | EvenArrivals | GammaArrivals = PoissonArrivals(table.rate_per_s)
    if table.cv != 1.0:
        arrivals = GammaArrivals(table.rate_per_s, table.cv) if table.cv else EvenArrivals(table.rate_per_s)
    num = table.num_requests or 1000
    if table.turns is None:
        return RandomWork(
            num_requests=num,
            arrivals=arrivals,
            prompt=table.prompt,
            output=table.output,
            prefixes=table.prefixes,
            models=models if len(models) > 1 else ("",),
        )
    return SessionWork(
        num_sessions=num,
        arrivals=arrivals,
        num_turns=table.turns,
        system=table.prefixes,
        message=table.prompt,
        output=table.output,
        think_s=table.think_s,
    )


def check_plannable(file: ScenarioFile) -> None:
    """Raises ConfigurationError for what can be simulated but not planned for: it would be passed over in silence."""
    what = (
        (len(models_of(file)) > 1, "several models", "give a file for each"),
        (any(pool.table for pool in file.pool), "steps of a table", "a table is of one cut: leave it out"),
        (bool(file.here), "workers on this machine", "give [[pool]] on described devices"),
    )
    for is_there, name, remedy in what:
        if is_there:
            raise ConfigurationError(f"{file.name}: {name} can be simulated; advise and plan cannot use it: {remedy}")


def traffic_of(file: ScenarioFile) -> Traffic:
    """For the planner. Raises ConfigurationError; sessions have no rate of their own: their turns wait for answers."""
    if file.traffic.turns is not None:
        raise ConfigurationError(f"{file.name}: sessions can be simulated; advise and plan need a trace or a rate")
    return read_traffic(file.name, work_of(file), file.seed)


def target_of(file: ScenarioFile) -> Target:
    return Target(Slo(file.slo.ttft_s, file.slo.tpot_s), file.slo.share)


def fleet_of(file: ScenarioFile) -> Fleet:
    """The devices of its pools, whatever they are used for. Raises ConfigurationError."""
    counts: dict[str, tuple[int, float]] = {}
    for pool in file.pool:
        name = catalogue.accelerator(pool.device).name
        count, usd = counts.get(name, (0, 0.0))
        counts[name] = (count + pool.count * pool.tp * pool.pp, pool.usd_per_hour or usd)
    return Fleet(
        model=load_model(file.model, file.folder),
        gpus=tuple(make_gpus(name, count, usd) for name, (count, usd) in counts.items()),
        engine=file.engine,
        weights=file.weights,
        kv=file.kv,
        link=file.link,
        block_size=file.block_size,
    )


def scenario_of(file: ScenarioFile) -> Scenario:
    """As the simulator takes it. Raises ConfigurationError, with the missing gigabytes where the model does not fit."""
    if not file.pool and not file.here:
        raise ConfigurationError(f"{file.name}: no workers: give a [[pool]] on described devices, or [[here]]")
    numbers = {role: count() for role in Role}
    serving = _serving_of(file)
    # As for cards: a narrower wire counts as a faster line. What is profiled here is sent as it is kept.
    gain = wire_gain(fleet_of(file), file.kv_wire) if file.pool else 1.0
    return Scenario(
        workers=(*_described(file, numbers), *_profiled(file, numbers)),
        work=work_of(file),
        slo=target_of(file).slo,
        fidelity=file.fidelity,
        lines=tuple(SiteLine(line.source, line.target, _line_of(line.link, gain)) for line in file.line),
        faults=(*file.dies, *file.breaks, *file.drains, *file.slows),
        local_prefill_tokens=file.local_prefill_tokens,
        contention=serving.contention if serving is not None else Contention(),
        request_s=serving.request_s if serving is not None else 0.0,
    )


def _described(file: ScenarioFile, numbers: dict[Role, "count[int]"]) -> Iterator[WorkerSpec]:
    """Workers on devices of the catalogue."""
    if not file.pool:
        return
    fleet = fleet_of(file)
    for pool in file.pool:
        cut = Cut(catalogue.accelerator(pool.device).name, pool.tp, pool.pp)
        shape = load_model(pool.model or file.model, file.folder)
        own = msgspec.structs.replace(fleet, model=shape, link=pool.link or file.link)
        model = _steps_of(file, pool, Steps(own).of(cut))
        for _ in range(pool.count):
            yield WorkerSpec(
                name=f"{pool.role}-{next(numbers[pool.role])}",
                role=pool.role,
                steps=model,
                model=pool.model or file.model,
                site=pool.site,
                num_blocks=model.max_kv_tokens(file.block_size) // file.block_size,
                block_size=file.block_size,
                max_context=max(MAX_CONTEXT, shape.max_context or 0),
                chunk_tokens=pool.chunk_tokens,
                mixed_chunk_tokens=pool.mixed_chunk_tokens,
                max_running=pool.max_running,
                nic=network_card(own, cut, file.kv_wire),
                ready_after_s=pool.ready_after_s,
            )


def _steps_of(file: ScenarioFile, pool: PoolTable, roofline: RooflineModel) -> StepModel:
    """The pool's table, with the room that the device has beside the weights; the roofline where it has none."""
    if not pool.table:
        return roofline
    card = MeasuredCard(
        name=f"{roofline.name} by {pool.table}",
        kv_bytes_per_token=roofline.kv_bytes_per_token,
        num_layers=roofline.num_layers,
        kv_tokens=roofline.max_kv_tokens(file.block_size),
    )
    return MeasuredTable(card, read_points(Path(file.folder, pool.table)))


def _profiled(file: ScenarioFile, numbers: dict[Role, "count[int]"]) -> Iterator[WorkerSpec]:
    """Workers on the machine of a profile."""
    for table in file.here:
        profile = Profile.read(Path(file.folder, table.profile))
        for _ in range(table.count):
            config = WorkerConfig(
                model=file.model,
                served_name=file.model,
                role=table.role,
                worker_id=f"{table.role}-{next(numbers[table.role])}",
                router_address="-",
                num_blocks=table.num_blocks,
                itl_target_s=table.itl_target_s,
            )
            yield msgspec.structs.replace(profiled_worker(config, profile), model=file.model)


def _serving_of(file: ScenarioFile) -> Serving | None:
    """What all its profiles say of the machine. Raises ConfigurationError where two differ."""
    profiles = [Profile.read(Path(file.folder, name)) for name in sorted({table.profile for table in file.here})]
    found = [profile.serving for profile in profiles if profile.serving is not None]
    if any(each != found[0] for each in found):
        raise ConfigurationError(f"{file.name}: profiles of {len(found)} machines: all [[here]] workers are on one")
    return found[0] if found else None


def _line_of(name: str, gain: float) -> Link:
    link = catalogue.link(name)
    return Link(gain * link.bytes_s, link.latency_s)
