"""CUDA's compiler for kernels that are compiled where they run: FlashInfer's and DeepGEMM's.

The wheels that torch brings hold nvcc, its headers and the runtime, but not as a toolkit: the
compiler is on nobody's PATH, the runtime has no name to link against, and the driver's library is
only where there is a GPU. vLLM then leaves those kernels out in silence. This lays out a folder as
CUDA's installer does it, of links into the wheels:

    python -m baton.engine.cuda_home ~/cuda
    export CUDA_HOME=~/cuda PATH=~/cuda/bin:$PATH

Source: FlashInfer 0.7, jit/cpp_ext.py (where it looks for nvcc, what it links); vLLM 0.33,
utils/flashinfer.py.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

USUAL = Path("/usr/local/cuda")
"""Where CUDA's installer puts a toolkit."""
_LINK_S = 60.0
_STUB = ("-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull)
"""A library of that name with nothing in it: what is linked against it finds the driver's later."""


class CannotCompileError(Exception):
    """Kernels cannot be compiled here; the message says what is missing and where it is had."""


def check_compilers(environ: Mapping[str, str], usual: Path = USUAL) -> Path:
    """Whether kernels can be compiled by processes with these variables.

    Returns:
        The compiler of CUDA that they find, as FlashInfer looks for it.

    Raises:
        CannotCompileError: a compiler is missing.
    """
    _compiler_of_hosts(environ)
    said = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=environ.get("PATH"))
    nvcc = Path(said) / "bin" / "nvcc" if said else Path(found) if found else usual / "bin" / "nvcc"
    if os.access(nvcc, os.X_OK):
        return nvcc
    raise CannotCompileError(
        f"got no nvcc at {nvcc}, expected CUDA's compiler there; run 'python -m"
        " baton.engine.cuda_home ~/cuda', then set CUDA_HOME=~/cuda and put ~/cuda/bin on the PATH"
    )


def _compiler_of_hosts(environ: Mapping[str, str]) -> str:
    compiler = shutil.which("g++", path=environ.get("PATH"))
    if compiler is None:
        raise CannotCompileError(
            "got no g++, expected one on the PATH; install it (apt-get install g++)"
        )
    return compiler


def packaged_toolkit() -> Path:
    """The folder in which the wheels put nvcc.

    Raises:
        CannotCompileError: there is none.
    """
    found = importlib.util.find_spec("nvidia")
    places = () if found is None else found.submodule_search_locations or ()
    kits = [kit for place in places for kit in sorted(Path(place).glob("cu[0-9]*"))]
    for kit in reversed(kits):
        if (kit / "bin" / "nvcc").is_file():
            return kit
    raise CannotCompileError(
        "got no package with nvcc, expected nvidia-cuda-nvcc; install baton[gpu]"
    )


def lay_out(kit: Path, home: Path, environ: Mapping[str, str]) -> None:
    """Make a folder that has what a toolkit has.

    Raises:
        FileExistsError: there is something already.
        CannotCompileError: there is no compiler for what runs on the CPU.
    """
    compiler = _compiler_of_hosts(environ)
    libraries = home / "lib64"
    home.mkdir(parents=True)
    (libraries / "stubs").mkdir(parents=True)
    for folder in kit.iterdir():
        if folder.name != libraries.name:
            (home / folder.name).symlink_to(folder)
    for library in (kit / "lib").glob("lib*"):
        (libraries / library.name).symlink_to(library)
        plain = libraries / f"{library.name.partition('.so.')[0]}.so"
        if ".so." in library.name and not plain.exists():
            plain.symlink_to(library)
    subprocess.run(  # noqa: S603 - a compiler, with words of our own
        [compiler, *_STUB, "-o", str(libraries / "stubs" / "libcuda.so")],
        check=True,
        capture_output=True,
        timeout=_LINK_S,
    )


def main(home: Path) -> int:
    """Lay out a toolkit and say how it is used."""
    try:
        lay_out(packaged_toolkit(), home, os.environ)
    except (CannotCompileError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"export CUDA_HOME={home} PATH={home}/bin:$PATH\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).expanduser().absolute()))
