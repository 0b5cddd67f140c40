"""`disagg advise`, `plan`, `simulate`: what may be asked, and how it is shown."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from disagg.cli.planner_flags import SEARCH, QuestionFlags
from disagg.cli.planner_text import advice_lines, outcome_lines, plan_lines
from disagg.cli.unfold import unfolded
from disagg.core.errors import ConfigurationError
from disagg.planner.advise import advise as find_advice
from disagg.planner.outcome_page import outcome_json, outcome_page
from disagg.planner.plan import plan as find_plan
from disagg.planner.scenario_file import read_scenario_file, scenario_of, target_of
from disagg.planner.search import Effort, Objective, Search, Watch
from disagg.planner.start_command import start_command
from disagg.sim.simulate import simulate as run_simulation

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the answer there, for programs.")]


@unfolded
def advise(flags: QuestionFlags, json: JsonFile = None) -> None:
    """Say whether splitting prefill and decode pays for this traffic on this hardware, and why."""
    asked = flags.question()
    effort = Effort(flags.requests)
    search = Search(asked.fleet, asked.traffic, asked.target, effort=effort, seed=asked.seed)
    with _watching(flags.limit_s) as watch:
        advice = find_advice(search, watch)
    print("\n".join(advice_lines(advice, asked.fleet, asked.target)))
    _write(json, msgspec.json.encode(advice))


@unfolded
def plan(
    flags: QuestionFlags,
    objective: Annotated[
        Objective, typer.Option(help="What is made most of.", rich_help_panel=SEARCH)
    ] = Objective.PER_GPU,
    json: JsonFile = None,
) -> None:
    """Find roles, counts, partitions and limits of workers for this traffic, and how much they can take."""
    asked = flags.question()
    effort = Effort(flags.requests)
    search = Search(asked.fleet, asked.traffic, asked.target, objective=objective, effort=effort, seed=asked.seed)
    with _watching(flags.limit_s) as watch:
        found = find_plan(search, watch)
    start = start_command(found.best.candidate, search.steps, asked.model)
    print("\n".join(plan_lines(found, asked.fleet, asked.target, start)))
    _write(json, msgspec.json.encode(found))


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Workers, traffic, targets, faults.")],
    seed: Annotated[int | None, typer.Option(help="Other than the file's.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with plots there.")] = None,
    json: JsonFile = None,
) -> None:
    """Play one scenario in virtual time with the serving code, and report on it."""
    file = read_scenario_file(scenario)
    chosen, target = scenario_of(file), target_of(file)
    outcome = run_simulation(chosen, file.seed if seed is None else seed)
    print("\n".join(outcome_lines(file.name, outcome.report)))
    if html is not None:
        slo = f"TTFT {target.slo.ttft_s:g} s, TPOT {1e3 * target.slo.tpot_s:g} ms"
        subtitle = f"{file.model}, {len(chosen.workers)} workers; targets {slo}; seed {outcome.report.seed}"
        _write(html, outcome_page(file.name, subtitle, outcome, target).encode())
    _write(json, outcome_json(file.name, outcome))


@contextlib.contextmanager
def _watching(limit_s: float) -> Iterator[Watch]:
    """A bar on a terminal; silence elsewhere."""
    until_s = time.process_time() + limit_s  # of computing, so that a busy machine gives the same answer
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("candidates", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what[:60])

        yield Watch(on_progress=show, is_over=lambda: time.process_time() >= until_s)


def _write(path: Path | None, content: bytes) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
