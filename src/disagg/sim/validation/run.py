"""All cases, judged."""

from collections.abc import Iterable

from disagg.sim.validation import scenario_cases, step_cases
from disagg.sim.validation.case import Case, cases
from disagg.sim.validation.data_folder import absent_reason
from disagg.sim.validation.report import Result, Verdict, judge, skip
from disagg.sim.validation.scenario import RunScenario


def validate(wanted: Iterable[str] = (), run_scenario: RunScenario | None = None) -> list[Result]:
    """Every check of the cases with these ids, of all if none is given.

    run_scenario: brings the cluster; without it the cases that need one are skipped. Raises KeyError for unknown ids.
    """
    known = {case.id: case for case in cases()}
    chosen = [known[name] for name in wanted] or list(known.values())
    return [result for case in chosen for result in _run(case, run_scenario)]


def is_clean(results: Iterable[Result]) -> bool:
    """Whether no check misses without a stated reason."""
    return all(result.verdict is not Verdict.MISS for result in results)


def _run(case: Case, run_scenario: RunScenario | None) -> list[Result]:
    reason = next((why for file in case.data if (why := absent_reason(file)) is not None), None)
    if reason is None and case.id in scenario_cases.RUNNERS and run_scenario is None:
        reason = "needs a simulated cluster, which this run does not have"
    if reason is not None:
        return [skip(case, check, reason) for check in case.checks]
    if case.id in scenario_cases.RUNNERS and run_scenario is not None:
        values = scenario_cases.RUNNERS[case.id](run_scenario)
    else:
        values = step_cases.RUNNERS[case.id]()
    return [judge(case, check, values[check.metric]) for check in case.checks]
