"""`disagg` on a device whose speed holds still: `python benchmarks/paced.py serve ...`, or any other of its commands.

Every step of every engine is computed as always, and then lasts as long as `PACE` says for what it computes, its layers
evenly spread over all but the end of that time. So the served system is all there, processes, scheduler, hand-off and
bytes, while a machine that is shared with others cannot make two runs differ, as long as it computes a step sooner than
its pace ends. Steps that came too late are counted: each is a line of the file that $DISAGG_PACED_LATE names.
"""

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import harness
from disagg.cli.main import main
from disagg.cli.serve import run_serve
from disagg.cli.worker_flags import DEFAULTS
from disagg.cluster.local import PROGRAM
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import HandoffId
from disagg.core.spans import KvLayout
from disagg.kvcache.memory import Memory
from disagg.policy.step_time import StepCosts
from disagg.scheduler.engine import Engine, OnLayers, StepPlan, StepResult
from disagg.sim.hardware.fitted import learned_shape
from disagg.sim.worker import shape_of
from disagg.testing.processes import Serve
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import LoadedEngine, load_engine
from harness import CpuUse

# Slower than two cores compute SmolLM2-135M with int8 weights even while the machine is at half its speed, with the
# proportions of a larger model on a GPU.
PACE = StepCosts(base_s=0.1, prompt_token_s=3e-3, prompt_pair_s=5e-7, stream_s=2.5e-3, context_token_s=2e-6)
HEAD_S = 0.01  # of that, after the last layer: scores and the choice of a token, which every step has
LATE_FILE = "DISAGG_PACED_LATE"


class Device(NamedTuple):
    """What a benchmark serves with."""

    program: tuple[str, ...]
    flags: tuple[str, ...]  # of workers
    itl_target_s: float  # that workers are to keep beside prompts, where a benchmark has them do so


# AMX tiles run at half speed whenever a neighbour on the host uses them; plain vectors swing by a third only.
LIVE = Device(PROGRAM, ("--kernels", "portable"), DEFAULTS.itl_target_s)
# int8 is computed fastest, so that few steps are late.
PACED = Device((sys.executable, str(Path(__file__).resolve())), ("--weights", "int8"), 0.2)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paced", action="store_true", help="on a device whose speed holds still: see paced.py")


def device(args: argparse.Namespace) -> Device:
    return PACED if args.paced else LIVE


class PacedEngine:
    """An engine whose steps take the time that they are to take."""

    def __init__(self, engine: Engine, pace: StepCosts, late_path: str) -> None:
        self._engine = engine
        self._pace = pace
        self._late_path = late_path

    @property
    def layout(self) -> KvLayout:
        return self._engine.layout

    @property
    def num_blocks(self) -> int:
        return self._engine.num_blocks

    @property
    def memory(self) -> Memory:
        return self._engine.memory

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        """See Engine."""
        num_layers = self.layout.num_layers
        layers = plan.layers
        share = 1.0 if layers is None else (layers.stop - layers.start) / num_layers
        first = 0 if layers is None else layers.start
        started_s, step_s = time.perf_counter(), share * self._pace.predict(learned_shape(shape_of(plan)))

        layers_s = step_s - (HEAD_S if layers is None else 0.0)

        def after_layers(num_done: int) -> None:
            last_until(started_s + layers_s * (num_done - first) / (share * num_layers))
            on_layers(num_done)

        result = self._engine.run_step(plan, after_layers)
        late_s = time.perf_counter() - started_s - step_s
        last_until(started_s + step_s)
        if late_s > 0 and self._late_path:
            with open(self._late_path, "a", encoding="ascii") as file:
                file.write(f"{late_s:.6f} {step_s:.6f}\n")
        return result

    def prepare_grammar(self, attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        """See Engine."""
        self._engine.prepare_grammar(attempt_id, grammar, emitted_ids)


def last_until(at_s: float) -> None:
    if (left_s := at_s - time.perf_counter()) > 0:
        time.sleep(left_s)  # this is the computing, not a wait for a state


@contextlib.contextmanager
def watched(args: argparse.Namespace) -> Iterator[None]:
    """Says at the end how many steps were late; only of clusters that were started meanwhile, and only if asked for."""
    if not args.paced:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {LATE_FILE: f"{folder}/late"}):
        yield
        print(f"\n{late_steps(Path(folder) / 'late')}")


def late_steps(path: Path) -> str:
    """One line on the steps that took longer than their pace: how many, by how much of what they were to take."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    late_s = sum(float(line.split()[0]) for line in lines)
    step_s = sum(float(line.split()[1]) for line in lines)
    share = late_s / step_s if lines else 0.0
    return f"{len(lines)} steps were late, in all by {late_s:.2f} s, {share:.1%} of what they were to take"


def foreign_share(args: argparse.Namespace, before: CpuUse, after: CpuUse) -> float:
    """As in harness. On a paced device late steps say whether others were in the way.

    Its processes wake at ticks of the clock, when the kernel also looks who is busy: they seem to take more.
    """
    return 0.0 if args.paced else harness.foreign_share(before, after)


def load_paced(config: WorkerConfig, path: Path) -> LoadedEngine:
    loaded = load_engine(config, path)
    return loaded._replace(engine=PacedEngine(loaded.engine, PACE, os.environ.get(LATE_FILE, "")))


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        for place in ("worker.process", "cli.profile_run"):
            stack.enter_context(mock.patch(f"disagg.{place}.load_engine", load_paced))
        # Whatever these start is this program too.
        for place, start in (("serve.run_serve", run_serve), ("profile_served.Serve", Serve)):
            stack.enter_context(mock.patch(f"disagg.cli.{place}", functools.partial(start, program=PACED.program)))
        main()
