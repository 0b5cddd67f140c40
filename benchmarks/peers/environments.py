"""A virtual environment of its own for each foreign engine, made when it is first needed and kept in the cache.

pip looks where it is set up to look. An environment is whole once its marker file holds its requirements.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from disagg.modelfiles.fetch import models_folder

INSTALL_TIMEOUT_S = 3600.0  # building llama.cpp on two slow cores takes its time
TORCH = "torch==2.13.0"  # the one that requirements.lock pins


class Unavailable(Exception):
    """An engine cannot be had on this machine; the text says why."""


class Environment(msgspec.Struct, frozen=True):
    """Packages that one engine needs."""

    name: str
    requirements: tuple[str, ...]
    variables: dict[str, str] = {}  # while it is installed
    needs: tuple[str, ...] = ()  # programs without which it cannot be built


def _native_variables() -> dict[str, str]:
    """Build llama.cpp for this very CPU.

    The flags are for AMX: GCC 12 does not see that loading a tile configuration reads all of it and leaves stores to it
    out, so that the first tile instruction is illegal.
    """
    variables = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "amx_tile" in cpu.read_text():
        variables |= dict.fromkeys(("CFLAGS", "CXXFLAGS"), "-fno-tree-dse -fno-dse")
    return variables


LLAMACPP_NATIVE = Environment(
    name="llamacpp-native",
    requirements=("llama-cpp-python==0.3.36",),  # built from source, for the CPU it is built on
    variables=_native_variables(),
    needs=("cc", "c++"),
)
LLAMACPP_PREBUILT = Environment("xllamacpp", ("xllamacpp==2026.10.11549", "numpy>=2,<3"))
OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1.0",))


def peers_folder() -> Path:
    """Where environments and converted models are kept."""
    return models_folder().parent / "peers"


def python_of(environment: Environment) -> Path:
    """The environment's interpreter; installs what is missing. Raises Unavailable."""
    folder = peers_folder() / environment.name
    python, marker = folder / "bin" / "python", folder / "requirements.txt"
    variables = [f"# {name}={value}" for name, value in sorted(environment.variables.items())]
    wanted = "\n".join([*environment.requirements, *variables]) + "\n"
    if marker.is_file() and marker.read_text() == wanted:
        return python
    missing = [program for program in environment.needs if shutil.which(program) is None]
    if missing:
        raise Unavailable(f"{environment.requirements[0]} is built from source, which needs {', '.join(missing)}")
    print(f"  installing {' '.join(environment.requirements)} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], {})
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    _run([*install, *environment.requirements], environment.variables)
    marker.write_text(wanted)
    return python


def _run(command: list[str], variables: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not installed within {INSTALL_TIMEOUT_S:g} s: {command[-1]}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        raise Unavailable(f"{command[-1]}: {lines[-1] if lines else f'exit code {done.returncode}'}"[:300])
