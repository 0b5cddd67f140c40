"""Compiling the kernels. Standard library only, so that it can run before anything else is installed.

    python -m disagg.engine.native.build        compile now, say where the result is

The result lies in the user's cache under a name that is a hash of sources and commands, so it is made once per version
of the code and never out of date. Without a C++ compiler, or on another kind of processor, there is none.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

COMMON = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-maybe-uninitialized")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
AMX = (*AVX512, "-mamx-int8", "-mamx-tile", "-mamx-bf16")
# Object -> (source, its own flags). A source is compiled once per instruction set; the choice is made when it runs.
OBJECTS = {
    "avx2.o": ("kernels.cpp", (*AVX2, "-DDISAGG_ISA=avx2")),
    "avx512.o": ("kernels.cpp", (*AVX512, "-DDISAGG_ISA=avx512")),
    "amx.o": ("amx.cpp", (*AMX, "-DDISAGG_ISA=amx_lanes")),
    "amx_split.o": ("amx_split.cpp", AMX),
    "dispatch.o": ("dispatch.cpp", ()),
}
TIMEOUT_S = 300.0


class Library(NamedTuple):
    """What is compiled into one file: sources of one folder, each with its own flags besides the common ones."""

    name: str
    folder: Path
    common: tuple[str, ...]
    objects: dict[str, tuple[str, tuple[str, ...]]]


KERNELS = Library("kernels", Path(__file__).parent, COMMON, OBJECTS)


class BuildError(Exception):
    """A library cannot be compiled here; the text says why."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/disagg/native, or ~/.cache/disagg/native."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "disagg" / "native"


def build(folder: Path | None = None, library: Library = KERNELS) -> Path:
    """The compiled library, made now if it is not there yet. Raises BuildError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"the {library.name} are written for x86-64 processors, this is {platform.machine()}")
    folder = folder or cache_folder()
    made = folder / f"{library.name}-{_fingerprint(library)}.so"
    if made.is_file():
        return made
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++ or clang++; another by CXX=...)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{library.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several workers start at once: one compiles
            if not made.is_file():
                _compile(compiler, library, made)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}") from error
    return made


def _fingerprint(library: Library) -> str:
    digest = hashlib.sha256(repr((library.common, library.objects)).encode())
    for path in sorted(library.folder.glob("*.cpp")) + sorted(library.folder.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: Library, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        running = []
        for name, (source, flags) in library.objects.items():
            command = [compiler, *library.common, *flags, "-c", str(library.folder / source)]
            running.append(_start([*command, "-o", f"{scratch}/{name}"]))
        for process in running:
            _finish(process, compiler)
        linked = f"{scratch}/linked.so"
        objects = [f"{scratch}/{name}" for name in library.objects]
        _finish(_start([compiler, "-shared", *library.common, *objects, "-o", linked]), compiler)
        os.replace(linked, made)  # whoever looks sees all of it or nothing


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(process: subprocess.Popen[bytes], compiler: str) -> None:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildError(f"the compiler did not end within {TIMEOUT_S:g} s") from None
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
        raise BuildError(f"{compiler} failed: {reason}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as failure:
        print(f"no native kernels, torch's own are used instead: {failure}", file=sys.stderr)
