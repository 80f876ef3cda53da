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
TRIED = ("0.33.",)
"""Versions whose wire was tried against the installed engines'; others may speak another."""
_ASK_S = 10.0
_AUTO = frozenset({"", "auto", "1", "true"})
_GET_IT = (
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
    said = environ.get(PATH_VARIABLE, "").strip()
    if said.lower() not in _AUTO:
        if _runs(Path(said)):
            return Path(said)
        raise EngineStartFailed(
            f"vLLM's Rust frontend: {PATH_VARIABLE} is {said!r}, wanted the path of an executable"
            f" {PROGRAM}",
            "correct the variable, or unset it to have the program looked for",
        )
    folder = package or _package_folder()
    if folder is not None and _runs(folder / PROGRAM):
        return folder / PROGRAM
    if found := shutil.which(PROGRAM, path=environ.get("PATH")):
        return Path(found)
    where = "no package vllm is installed" if folder is None else f"there is none in {folder}"
    raise EngineStartFailed(
        f"vLLM's Rust frontend: wanted an executable {PROGRAM}, {where} nor on the PATH", _GET_IT
    )


def check_version(program: Path) -> str:
    """What version it is, of those that were tried; blocks for a moment.

    Raises:
        EngineStartFailed: it does not run here, or nobody has tried it.
    """
    try:
        asked = subprocess.run(  # noqa: S603 - the program that is about to be started
            [program, "--version"], check=True, capture_output=True, text=True, timeout=_ASK_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineStartFailed(f"{program} does not run: {error}", _GET_IT) from error
    words = asked.stdout.split()
    if words[:1] == [PROGRAM] and len(words) > 1 and words[1].startswith(TRIED):
        return words[1]
    raise EngineStartFailed(
        f"{program}: got {asked.stdout.strip()[:80]!r}, wanted {PROGRAM} of a version"
        f" {' or '.join(TRIED)}*",
        "use a version that was tried: another may speak to engines in other words",
    )


def _package_folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
