"""What `disagg serve` is about to start, checked before anything is started."""

import errno
import socket
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from disagg.cluster.cores import CoreShare, split_cores
from disagg.core.errors import ConfigurationError
from disagg.core.formats import Weights
from disagg.core.roles import Numerics, Role
from disagg.policy.restart import DEFAULT_RESTART_POLICY, RestartPolicy
from disagg.router.config import RouterConfig
from disagg.worker.config import WorkerConfig

MAX_LOCAL_WORKERS = 256
# Prompts wait for each other anyway; tokens of running answers wait for nobody. So whatever runs besides the workers
# shares cores with who reads prompts, and not with who writes answers.
PREFILL_NICENESS = 5
NO_WEIGHTS: Mapping[Role, Weights] = MappingProxyType({})


class PoolSizes(msgspec.Struct, frozen=True):
    """How many workers of each role."""

    num_prefill: int = 0
    num_decode: int = 0
    num_mixed: int = 0

    @property
    def total(self) -> int:
        return self.num_prefill + self.num_decode + self.num_mixed

    def roles(self) -> tuple[tuple[str, Role], ...]:
        """(worker id, role) of every worker."""
        counts = ((Role.PREFILL, self.num_prefill), (Role.DECODE, self.num_decode), (Role.MIXED, self.num_mixed))
        return tuple((f"{role.value}-{n}", role) for role, count in counts for n in range(count))


class LocalPlan(msgspec.Struct, frozen=True):
    """One router and its workers on this machine. Their router_address is filled in when the router listens."""

    router: RouterConfig
    workers: tuple[WorkerConfig, ...]
    restart: RestartPolicy = DEFAULT_RESTART_POLICY


def check_pool_sizes(sizes: PoolSizes) -> None:
    """Raises ConfigurationError for pools that could not answer a single request."""
    for name, count in (("prefill", sizes.num_prefill), ("decode", sizes.num_decode), ("mixed", sizes.num_mixed)):
        if count < 0:
            raise ConfigurationError(f"--{name} is {count}: it must be 0 or more")
    if sizes.total == 0:
        raise ConfigurationError("nothing to serve: ask for workers, as in --prefill 1 --decode 1, or --mixed 1")
    if sizes.num_prefill and not sizes.num_decode and not sizes.num_mixed:
        raise ConfigurationError(
            f"--prefill {sizes.num_prefill} without --decode: prefill workers only read prompts; add --decode 1"
        )
    if sizes.total > MAX_LOCAL_WORKERS:
        raise ConfigurationError(f"{sizes.total} workers: at most {MAX_LOCAL_WORKERS} run on one machine")


def plan_local(
    router: RouterConfig,
    template: WorkerConfig,
    sizes: PoolSizes,
    shares: tuple[CoreShare, ...] | None = None,
    weights: Mapping[Role, Weights] = NO_WEIGHTS,
    prefill_niceness: int = PREFILL_NICENESS,
) -> LocalPlan:
    """Workers named prefill-0, decode-0, mixed-0 and so on, each like `template` but for role, name and cores.

    weights: of some roles, where they differ from the template's. Cores and threads that the template sets are kept.
    Raises ConfigurationError.
    """
    check_pool_sizes(sizes)
    _check_weights(template, {weights.get(role, template.weights) for _, role in sizes.roles()})
    shares = split_cores(sizes.total) if shares is None else shares
    has_own_cores = not template.cores and template.num_threads is None and template.device in ("auto", "cpu")
    workers = []
    for (worker_id, role), share in zip(sizes.roles(), shares, strict=True):
        kind = weights.get(role, template.weights)
        niceness = prefill_niceness if role is Role.PREFILL else template.niceness
        worker = msgspec.structs.replace(template, worker_id=worker_id, role=role, weights=kind, niceness=niceness)
        if has_own_cores:
            worker = msgspec.structs.replace(worker, cores=share.cores, num_threads=share.num_threads)
        workers.append(worker)
    return LocalPlan(router, tuple(workers))


def _check_weights(template: WorkerConfig, kinds: set[Weights]) -> None:
    if len(kinds) > 1 and template.numerics is Numerics.EXACT:
        names = " and ".join(sorted(kind.value for kind in kinds))
        text = f"workers with {names} weights give unlike answers, and exact numerics promise equal ones"
        raise ConfigurationError(f"{text}: add --numerics bounded, or choose one kind of weights")


def check_ports(router: RouterConfig) -> None:
    """Raises ConfigurationError, naming the flag to change, when a port cannot be had now."""
    _check_port(router.host, router.port, "--port")
    _check_port(router.control_host, router.control_port, "--control-port")


def _check_port(host: str, port: int, flag: str) -> None:
    host_flag = flag.replace("port", "host")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            # Connections of an earlier run that linger in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise ConfigurationError(f"{host_flag} {host}: no such address ({error.strerror})") from error
    except PermissionError as error:
        raise ConfigurationError(
            f"port {port} needs privileges this user lacks: choose one above 1023, {flag}"
        ) from error
    except OSError as error:
        to_change = host_flag if error.errno == errno.EADDRNOTAVAIL else flag
        raise ConfigurationError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another {to_change}"
        ) from error
