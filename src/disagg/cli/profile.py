"""`disagg profile`: what may be asked of it."""

from disagg.cli import launch
from disagg.cli import options as opt
from disagg.cli.notes import say
from disagg.cli.profile_options import ProfileOptions
from disagg.cli.unfold import unfolded
from disagg.cli.worker_flags import EngineFlags
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.modelfiles.fetch import served_name


@unfolded
def profile(model: opt.ModelArgument, asked: ProfileOptions, engine: EngineFlags) -> None:
    """Time steps of a model here, fit costs to them, and write both to a file.

    With --served-rounds also what serving adds: the worker loop, router and HTTP, a busy neighbour on this machine.
    """
    config = engine.config(
        model=str(launch.find_model(model, report=say)),
        served_name=served_name(model),
        role=Role.MIXED,
        worker_id="profile",
        router_address="-",
    )
    if not asked.out.parent.is_dir():
        raise ConfigurationError(f"{asked.out.parent} is not a folder: make it first or give another --out")
    launch.run_profile(config, asked)
