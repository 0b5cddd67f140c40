"""`disagg serve` whose router and workers are fakes. Arguments: start_timeout_s stop_timeout_s num_workers."""

import sys
from pathlib import Path

from disagg.channel.lifeline import watch_parent
from disagg.cli.serve import run_serve
from disagg.cluster.plan import PoolSizes, plan_local
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.roles import Role
from disagg.router.config import RouterConfig
from disagg.worker.config import WorkerConfig

FAKE = Path(__file__).parents[1] / "cluster" / "fake_disagg.py"


def main() -> int:
    start_timeout_s, stop_timeout_s, num_workers = (float(text) for text in sys.argv[1:])
    watch_parent()
    plan = plan_local(
        RouterConfig(models=(("m", "/m"),), port=0, control_port=0),
        WorkerConfig(model="/m", served_name="m", role=Role.MIXED, worker_id="-", router_address=""),
        PoolSizes(num_mixed=int(num_workers)),
    )
    try:
        return run_serve(
            plan,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=stop_timeout_s,
            program=(sys.executable, str(FAKE)),
        )
    except ConfigurationError as error:
        print(f"disagg: {error}")
        return 2
    except InternalFault as error:
        print(f"disagg: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
