"""Whether baton's couplings to private names fit the installed packages, vendor by vendor.

Guards import vLLM, Ray Serve and NIXL, so they run in a process of their own. An import takes
seconds and may crash, and this process must set the environment of Ray Serve first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

import msgspec

from baton.engine.gpus import use_cpu_without_gpus

COUPLINGS_TIMEOUT_S: Final = 180.0
_TABLES: Final = {
    "vLLM": "baton.engine.vllm.patches.table",
    "Ray": "baton.serving.ray.couplings",
    "NIXL": "baton.transfer.couplings",
}
_SCRIPT = """
import importlib, json, sys
from baton.runtime.patch import coupling_report
rows = []
for vendor, table in json.loads(sys.argv[1]).items():
    for row in coupling_report(importlib.import_module(table).PATCHES):
        rows.append({"vendor": vendor, **row})
print("\\n" + json.dumps(rows))
"""


class Coupling(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a table, and whether it fits."""

    vendor: str
    name: str
    package: str
    problem: str | None
    """Why it does not fit; None where it does."""
    fallback: str
    is_required: bool


def read_couplings() -> tuple[Coupling, ...]:
    """Try every row; blocks for seconds.

    Raises:
        RuntimeError: the process that tries them failed.
        subprocess.TimeoutExpired: it did not end.
    """
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    use_cpu_without_gpus(environ)
    completed = subprocess.run(  # noqa: S603 - this Python, a program of our own
        [sys.executable, "-c", _SCRIPT, json.dumps(_TABLES)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=COUPLINGS_TIMEOUT_S,
        check=False,
        env=environ,
    )
    lines = completed.stdout.strip().splitlines()
    if completed.returncode or not lines:
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that tries them ended with {completed.returncode}: {last}")
    return msgspec.json.decode(lines[-1], type=tuple[Coupling, ...])


def coupling_findings(couplings: Iterable[Coupling]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rows that do not fit, one line each: those that stop a start, and those turned off."""
    unfit = [coupling for coupling in couplings if coupling.problem is not None]
    return (
        tuple(_line(coupling) for coupling in unfit if coupling.is_required),
        tuple(_line(coupling) for coupling in unfit if not coupling.is_required),
    )


def _line(coupling: Coupling) -> str:
    return (
        f"{coupling.name}: got {coupling.problem}, expected the private names of a tested"
        f" {coupling.package}; install that; otherwise {coupling.fallback}"
    )
