"""torch without what only its compiler asks for: the same tokens, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import torch
from tests.unit.engine.steps import generate, make_engine

from disagg.engine.lean_torch import SHAPES_WITHOUT_MEMORY, leave_out_shapes
from disagg.testing.model_files import write_tiny_llama

PROMPT = [5, 9, 2, 77, 30]
LEAN = """
import sys
from pathlib import Path

from disagg.engine.lean_torch import SHAPES_WITHOUT_MEMORY, leave_out_shapes

leave_out_shapes()
from tests.unit.engine.steps import generate, make_engine

print(generate(make_engine(Path(sys.argv[1])), {prompt}, [0, 1], 6))
assert getattr(sys.modules[SHAPES_WITHOUT_MEMORY], "__file__", None) is None, "nothing was left out"
"""


def test_a_process_without_it_gives_the_same_tokens(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny")
    command = (sys.executable, "-c", LEAN.format(prompt=PROMPT), str(path))
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, check=True, timeout=120.0, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == str(generate(make_engine(path), PROMPT, [0, 1], 6))


def test_nothing_changes_once_torch_is_there() -> None:
    before = sys.modules[SHAPES_WITHOUT_MEMORY]
    leave_out_shapes()
    assert sys.modules[SHAPES_WITHOUT_MEMORY] is before
    assert torch.empty(2, device="meta").shape == (2,)
