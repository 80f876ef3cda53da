"""What is built or installed at first use: two programs in C, and an environment for each rival.

All of it is kept in a folder of its own outside the repository, by what it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.engine.tiny_model import write_tiny_model
from baton.serving.replica.engines import tiny_model_folder

MAX_LEN_TOKENS = 32_768
_FOLDER = Path(__file__).parent
_BUILD_TIMEOUT_S = 60.0
_INSTALL_TIMEOUT_S = 900.0


class NotAvailableError(RuntimeError):
    """A program that this machine cannot have; the reason is for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A rival as it is published: exact versions of what is its own."""

    name: str
    requirements: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Installed first, and without what they ask for: where that cannot be had."""


def cache_folder() -> Path:
    """Where programs, environments and the model are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "baton-rivals"


def compile_program(name: str, *, into: Path | None = None) -> Path:
    """The program of `NAME.c`, compiled when its source is new.

    Raises:
        NotAvailableError: there is no C compiler, or it refused.
    """
    source = _FOLDER / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    program = (into or cache_folder() / "bin") / f"{name}-{digest}"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotAvailableError("no C compiler: install gcc")
    program.parent.mkdir(parents=True, exist_ok=True)
    scratch = program.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(scratch), str(source)]
    _run(command, timeout_s=_BUILD_TIMEOUT_S)
    scratch.rename(program)
    return program


def create_environment(package: Package) -> Path:
    """The `bin` folder of a virtual environment that has a package, made at first use.

    Raises:
        NotAvailableError: it cannot be installed.
    """
    spec = json.dumps(asdict(package) | {"python": sys.version_info[:2]})
    digest = hashlib.sha256(spec.encode()).hexdigest()[:12]
    folder = cache_folder() / f"{package.name}-{digest}"
    if (folder / "complete").exists():
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], timeout_s=_INSTALL_TIMEOUT_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if package.without_dependencies:
        _run([*pip, "--no-deps", *package.without_dependencies], timeout_s=_INSTALL_TIMEOUT_S)
    if package.requirements:
        _run([*pip, *package.requirements], timeout_s=_INSTALL_TIMEOUT_S)
    (folder / "complete").touch()
    return folder / "bin"


def write_long_tiny_model() -> Path:
    """The tiny model, which says of itself that it takes long prompts."""
    folder = cache_folder() / "tiny"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(write_tiny_model(tiny_model_folder()), folder)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {key: MAX_LEN_TOKENS}))
    (folder / "complete").touch()
    return folder


def _run(command: list[str], *, timeout_s: float) -> None:
    try:
        result = subprocess.run(  # noqa: S603 - a compiler, or Python's own installer
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise NotAvailableError(f"{command[0]} took more than {timeout_s:.0f} s") from None
    if result.returncode != 0:
        error_lines = [line for line in result.stderr.splitlines() if "WARNING" not in line]
        raise NotAvailableError("; ".join(error_lines[-3:])[:500])
