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

SOURCES = Path(__file__).parent
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


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/disagg/native, or ~/.cache/disagg/native."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "disagg" / "native"


def build(folder: Path | None = None) -> Path:
    """The compiled library, made now if it is not there yet. Raises BuildError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"the kernels are written for x86-64 processors, this is {platform.machine()}")
    folder = folder or cache_folder()
    library = folder / f"kernels-{_fingerprint()}.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++ or clang++; another by CXX=...)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several workers start at once: one compiles
            if not library.is_file():
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror or error}") from error
    return library


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((COMMON, OBJECTS)).encode())
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        running = []
        for name, (source, flags) in OBJECTS.items():
            running.append(_start([compiler, *COMMON, *flags, "-c", str(SOURCES / source), "-o", f"{scratch}/{name}"]))
        for process in running:
            _finish(process, compiler)
        made = f"{scratch}/kernels.so"
        objects = [f"{scratch}/{name}" for name in OBJECTS]
        _finish(_start([compiler, "-shared", "-fopenmp", *objects, "-o", made]), compiler)
        os.replace(made, library)  # whoever looks sees all of it or nothing


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
