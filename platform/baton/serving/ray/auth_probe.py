"""Whether Ray asks clients for a token: found out by connecting without one."""

from __future__ import annotations

import os
import subprocess
import sys

_PROBE_TIMEOUT_S = 20.0
_PROBE_SCRIPT = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"", 5)
    print("open")
except Exception as error:
    text = f"{type(error).__name__} {error}".lower()
    refused = "unauthenticated" in text or "authenticationerror" in text
    print("guarded" if refused else f"{type(error).__name__}: {error}".splitlines()[0])
"""
"""Asks the store of Ray's head for something, without a token."""


def probe_ray_auth(address: str) -> str:
    """`guarded` or `open`, from a connection to Ray's store without a token; else the problem.

    It runs in a process of its own, since Ray reads its authentication mode once.
    """
    environment = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
    command = [sys.executable, "-c", _PROBE_SCRIPT, address]
    environment |= {"RAY_AUTH_MODE": "disabled"}
    try:
        completed = subprocess.run(  # noqa: S603 - this Python, a program of our own
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    lines = completed.stdout.strip().splitlines()
    return lines[-1] if lines else f"the process that asks ended with {completed.returncode}"
