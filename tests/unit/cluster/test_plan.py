"""What serve is about to start is checked before anything starts, and survives the trip over a command line."""

import socket

import pytest

from disagg.cluster.command_line import router_arguments, worker_arguments
from disagg.cluster.cores import CoreShare
from disagg.cluster.plan import PREFILL_NICENESS, PoolSizes, check_pool_sizes, check_ports, plan_local
from disagg.core.errors import ConfigurationError
from disagg.core.roles import HandoffMode, Role
from disagg.router.config import RouterConfig
from disagg.worker.config import WorkerConfig

ROUTER = RouterConfig(models=(("m", "/m"),), port=0, control_port=0)
TEMPLATE = WorkerConfig(model="/m", served_name="m", role=Role.MIXED, worker_id="-", router_address="")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (PoolSizes(), "nothing to serve"),
        (PoolSizes(num_prefill=2), "--prefill 2 without --decode"),
        (PoolSizes(num_decode=-1), "--decode is -1"),
        (PoolSizes(num_mixed=1000), "1000 workers: at most 256"),
    ],
)
def test_pools_that_cannot_answer_are_refused(sizes: PoolSizes, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_pool_sizes(sizes)


def test_workers_are_named_by_role_and_get_their_cores() -> None:
    shares = (CoreShare((0,), 1), CoreShare((1,), 1), CoreShare((2,), 1))
    plan = plan_local(ROUTER, TEMPLATE, PoolSizes(1, 1, 1), shares)
    assert [(w.worker_id, w.role, w.cores, w.num_threads) for w in plan.workers] == [
        ("prefill-0", Role.PREFILL, (0,), 1),
        ("decode-0", Role.DECODE, (1,), 1),
        ("mixed-0", Role.MIXED, (2,), 1),
    ]


def test_prefill_workers_let_others_go_first() -> None:
    shares = (CoreShare((0,), 1), CoreShare((1,), 1), CoreShare((2,), 1))
    plan = plan_local(ROUTER, TEMPLATE, PoolSizes(1, 1, 1), shares)
    assert [worker.niceness for worker in plan.workers] == [PREFILL_NICENESS, 0, 0]
    plan = plan_local(ROUTER, TEMPLATE, PoolSizes(1, 1, 1), shares, prefill_niceness=0)
    assert [worker.niceness for worker in plan.workers] == [0, 0, 0]
    with pytest.raises(ConfigurationError, match="niceness is 20: it must be 0"):
        plan_local(ROUTER, TEMPLATE, PoolSizes(1, 1, 1), shares, prefill_niceness=20)


def test_threads_chosen_by_the_operator_are_kept() -> None:
    template = WorkerConfig(
        model="/m", served_name="m", role=Role.MIXED, worker_id="-", router_address="", num_threads=7
    )
    plan = plan_local(ROUTER, template, PoolSizes(num_mixed=1), (CoreShare((0,), 1),))
    assert (plan.workers[0].num_threads, plan.workers[0].cores) == (7, ())


@pytest.mark.parametrize("field", ["port", "control_port"])
def test_a_port_in_use_is_one_plain_line_with_the_flag_to_change(field: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ports = {"port": 0, "control_port": 0} | {field: port}
        with pytest.raises(ConfigurationError, match=rf"{port} .*--{field.replace('_', '-')}$"):
            check_ports(RouterConfig(models=(("m", "/m"),), **ports))


def test_an_address_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"--host no-such-host\.invalid"):
        check_ports(RouterConfig(models=(("m", "/m"),), host="no-such-host.invalid", port=0))


def test_an_address_of_another_machine_is_the_hosts_fault() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:0 .*choose another --host"):
        check_ports(RouterConfig(models=(("m", "/m"),), host="192.0.2.1", port=0))


def test_command_lines_leave_defaults_out() -> None:
    config = WorkerConfig(
        model="/m",
        served_name="m",
        role=Role.DECODE,
        worker_id="decode-0",
        router_address="127.0.0.1:9",
        handoff=HandoffMode.SYNC,
        cores=(0, 1),
        kv_memory_bytes=1 << 29,
    )
    assert worker_arguments(config) == (
        *("worker", "/m", "--served-name", "m", "--role", "decode", "--worker-id", "decode-0"),
        *("--router-address", "127.0.0.1:9", "--cores", "0,1", "--kv-memory", "536870912", "--handoff", "sync"),
    )
    assert router_arguments(ROUTER) == ("router", "--model", "m=/m", "--port", "0", "--control-port", "0")


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("num_blocks", 0), ("lease_s", 0.0), ("beat_interval_s", 0.0), ("worker_id", " ")],
)
def test_worker_values_that_cannot_work_are_named(field: str, value: object) -> None:
    arguments = {"model": "/m", "served_name": "m", "role": Role.MIXED, "worker_id": "w", "router_address": ""}
    with pytest.raises(ConfigurationError, match=field):
        WorkerConfig(**(arguments | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", ()),
        ("models", (("a", "/1"), ("a", "/2"))),
        ("port", 70000),
        ("max_open_requests", 0),
        ("max_queue_s", 0.0),
    ],
)
def test_router_values_that_cannot_work_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError):
        RouterConfig(**({"models": (("m", "/m"),)} | {field: value}))  # type: ignore[arg-type]
