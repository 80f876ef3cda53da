"""Which code this process runs, as a name: the version, and a word for the content of its files."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import baton

_CONSOLE: Final = "console"
"""Its pages are part of what runs; whatever else is no Python is for commands alone."""
_DIGITS: Final = 12


@cache
def code_name() -> str:
    """As `0.2.0+3f2a9c1b77d0`; another one for any change of the code, whatever its version says.

    Read once: files that are replaced later are not what this process runs.
    """
    return f"{baton.__version__}+{content(Path(baton.__file__).parent)}"


def content(package: Path) -> str:
    """A word for the files of the package in a folder; the same wherever it is installed."""
    found = sha256()
    for file in sorted(package.rglob("*")):
        inside = file.relative_to(package)
        ours = file.suffix == ".py" or inside.parts[0] == _CONSOLE
        if ours and "__pycache__" not in inside.parts and file.is_file():
            found.update(f"{inside.as_posix()}\0{sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:_DIGITS]
