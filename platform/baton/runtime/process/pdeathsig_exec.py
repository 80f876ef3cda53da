"""Runs a program that dies with its parent process.

Theory of operation: PR_SET_PDEATHSIG tells the kernel to kill this process when its parent dies;
exec keeps that and all passed descriptors. Python cannot set it between fork and exec without
risking a deadlock in a parent with threads.

It is run by path: nothing of baton may be imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to the parent with the id in the first argument, then exec the rest."""
    parent, *program = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the parent has died already")
    os.execv(program[0], program)  # noqa: S606 - this process stands in for it


if __name__ == "__main__":
    main(sys.argv[1:])
