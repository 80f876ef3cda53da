"""Where vLLM's Rust frontend is: the program `vllm-rs`, which the wheels of `vllm` bring along.

It is looked for as `vllm serve` does it: where VLLM_RUST_FRONTEND_PATH says, else in the folder of
the package `vllm`. The PATH comes last, because builds of vLLM for CPUs are without it while the
program itself runs on any machine of its architecture. Nothing of vLLM's is imported.

Source: vLLM 0.33, envs.py, `_resolve_rust_cli_path`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from baton.domain.errors import EngineStartFailed

PATH_VARIABLE = "VLLM_RUST_FRONTEND_PATH"
PROGRAM = "vllm-rs"
TESTED_VERSIONS = ("0.33.",)
"""Versions whose wire was tried against the installed engines'; others may speak another."""
_VERSION_TIMEOUT_S = 10.0
_AUTO_VALUES = frozenset({"", "auto", "1", "true"})
_INSTALL_HINT = (
    "install a wheel of vllm 0.33 that holds it (the one for GPUs does), or set"
    f" {PATH_VARIABLE} to the program; or use 'python'"
)


def find_rust_frontend(environ: Mapping[str, str], *, package: Path | None = None) -> Path:
    """The program to start.

    Args:
        environ: What says where it is.
        package: The folder of the package `vllm`; None: of the one that is installed.

    Raises:
        EngineStartFailed: it is nowhere, or not where the variable says.
    """
    configured = environ.get(PATH_VARIABLE, "").strip()
    if configured.lower() not in _AUTO_VALUES:
        if _is_executable(Path(configured)):
            return Path(configured)
        raise EngineStartFailed(
            f"vLLM's Rust frontend: {PATH_VARIABLE} is {configured!r}, wanted the path of an"
            " executable"
            f" {PROGRAM}",
            "correct the variable, or unset it to have the program looked for",
        )
    folder = package or _package_folder()
    if folder is not None and _is_executable(folder / PROGRAM):
        return folder / PROGRAM
    if on_path := shutil.which(PROGRAM, path=environ.get("PATH")):
        return Path(on_path)
    searched = "no package vllm is installed" if folder is None else f"there is none in {folder}"
    raise EngineStartFailed(
        f"vLLM's Rust frontend: wanted an executable {PROGRAM}, {searched} nor on the PATH",
        _INSTALL_HINT,
    )


def check_version(program: Path) -> str:
    """What version it is, of those that were tried; blocks for a moment.

    Raises:
        EngineStartFailed: it does not run here, or nobody has tried it.
    """
    try:
        completed = subprocess.run(  # noqa: S603 - the program that is about to be started
            [program, "--version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineStartFailed(f"{program} does not run: {error}", _INSTALL_HINT) from error
    words = completed.stdout.split()
    if words[:1] == [PROGRAM] and len(words) > 1 and words[1].startswith(TESTED_VERSIONS):
        return words[1]
    raise EngineStartFailed(
        f"{program}: got {completed.stdout.strip()[:80]!r}, wanted {PROGRAM} of a version"
        f" {' or '.join(TESTED_VERSIONS)}*",
        "use a version that was tried: another may speak to engines in other words",
    )


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
