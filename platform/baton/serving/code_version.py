"""Which code this process runs, as a name: the version, and a word for the content of its files."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import baton

_CONSOLE: Final = "console"
"""Its pages are part of what runs; whatever else is no Python is for commands alone."""
_HASH_DIGITS: Final = 12


@cache
def code_version() -> str:
    """As `0.2.0+3f2a9c1b77d0`; another one for any change of the code, whatever its version says.

    Read once: files that are replaced later are not what this process runs.
    """
    return f"{baton.__version__}+{content_hash(Path(baton.__file__).parent)}"


def content_hash(package: Path) -> str:
    """A word for the files of the package in a folder; the same wherever it is installed."""
    digest = sha256()
    for file in sorted(package.rglob("*")):
        relative = file.relative_to(package)
        is_included = file.suffix == ".py" or relative.parts[0] == _CONSOLE
        if is_included and "__pycache__" not in relative.parts and file.is_file():
            digest.update(
                f"{relative.as_posix()}\0{sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()[:_HASH_DIGITS]
