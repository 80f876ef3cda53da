"""CUDA's compiler for kernels that are compiled at runtime: FlashInfer's and DeepGEMM's.

The wheels that torch installs have nvcc, its headers and the runtime, but not as a toolkit. The
compiler is not on the PATH, the runtime has no name to link against, and the driver's library
exists only with a GPU. vLLM then omits those kernels without a message. This module creates a
folder like that of CUDA's installer, with links into the wheels:

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

from baton.domain.names.distribution import pip_install

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
"""The folder of CUDA's installer."""
_LINK_TIMEOUT_S = 60.0
_STUB_ARGUMENTS = ("-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull)
"""For an empty library of that name; programs linked against it load the driver's later."""


class CannotCompileError(Exception):
    """Kernels cannot be compiled here; the message names the missing part and a remedy."""


def check_compilers(environ: Mapping[str, str], default_home: Path = DEFAULT_CUDA_HOME) -> Path:
    """Find CUDA's compiler for processes with these variables, as FlashInfer does.

    Raises:
        CannotCompileError: a compiler is missing.
    """
    _find_host_compiler(environ)
    configured = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    nvcc = (
        Path(configured) / "bin" / "nvcc"
        if configured
        else Path(on_path)
        if on_path
        else default_home / "bin" / "nvcc"
    )
    if os.access(nvcc, os.X_OK):
        return nvcc
    raise CannotCompileError(
        f"got no nvcc at {nvcc}, expected CUDA's compiler there; run 'python -m"
        " baton.engine.cuda_home ~/cuda', then set CUDA_HOME=~/cuda and put ~/cuda/bin on the PATH"
    )


def _find_host_compiler(environ: Mapping[str, str]) -> str:
    compiler = shutil.which("g++", path=environ.get("PATH"))
    if compiler is None:
        raise CannotCompileError(
            "got no g++, expected one on the PATH; install it (apt-get install g++)"
        )
    return compiler


def find_packaged_toolkit() -> Path:
    """The folder in which the wheels put nvcc.

    Raises:
        CannotCompileError: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    locations = () if spec is None else spec.submodule_search_locations or ()
    toolkits = [toolkit for place in locations for toolkit in sorted(Path(place).glob("cu[0-9]*"))]
    for toolkit in reversed(toolkits):
        if (toolkit / "bin" / "nvcc").is_file():
            return toolkit
    raise CannotCompileError(
        f"got no package with nvcc, expected nvidia-cuda-nvcc; run {pip_install('gpu')}"
    )


def create_toolkit(toolkit: Path, home: Path, environ: Mapping[str, str]) -> None:
    """Create a folder with the layout of a toolkit.

    Raises:
        FileExistsError: the folder exists.
        CannotCompileError: there is no host compiler.
    """
    compiler = _find_host_compiler(environ)
    libraries = home / "lib64"
    home.mkdir(parents=True)
    (libraries / "stubs").mkdir(parents=True)
    for folder in toolkit.iterdir():
        if folder.name != libraries.name:
            (home / folder.name).symlink_to(folder)
    for library in (toolkit / "lib").glob("lib*"):
        (libraries / library.name).symlink_to(library)
        unversioned = libraries / f"{library.name.partition('.so.')[0]}.so"
        if ".so." in library.name and not unversioned.exists():
            unversioned.symlink_to(library)
    subprocess.run(  # noqa: S603 - a compiler, with fixed arguments
        [compiler, *_STUB_ARGUMENTS, "-o", str(libraries / "stubs" / "libcuda.so")],
        check=True,
        capture_output=True,
        timeout=_LINK_TIMEOUT_S,
    )


def main(home: Path) -> int:
    """Create a toolkit and print how to use it."""
    try:
        create_toolkit(find_packaged_toolkit(), home, os.environ)
    except (CannotCompileError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"export CUDA_HOME={home} PATH={home}/bin:$PATH\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).expanduser().absolute()))
