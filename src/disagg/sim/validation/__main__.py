"""`python -m disagg.sim.validation [CASE ...]`: published, ours, error, tolerance.

Exit code 1 if a check misses without a stated reason, 2 for an unknown case.
"""

import sys

from disagg.sim.validation.case import cases
from disagg.sim.validation.cluster_run import run_scenario
from disagg.sim.validation.report import lines
from disagg.sim.validation.run import is_clean, validate


def main(arguments: list[str]) -> int:
    unknown = set(arguments) - {case.id for case in cases()}
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(case.id for case in cases())}", file=sys.stderr
        )
        return 2
    results = validate(arguments, run_scenario)
    print("\n".join(lines(results)))
    return 0 if is_clean(results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
