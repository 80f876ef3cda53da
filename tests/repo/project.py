"""The project's own files, as the tests beside this one look at them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", "dist"}
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class CodeBlock(NamedTuple):
    """A fenced block of a document."""

    file: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def files() -> list[Path]:
    """Every file that is, or would be, part of the project."""
    if (ROOT / ".git").exists():
        output = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=30,
        ).stdout
        paths = [ROOT / name.decode() for name in output.split(b"\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not SKIPPED_FOLDERS & set(p.relative_to(ROOT).parts)]
    return sorted(path for path in paths if path.is_file())


def texts() -> Iterator[tuple[str, str]]:
    """Each text file's path within the project, and what it says."""
    for path in files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@cache
def documents() -> Mapping[str, str]:
    """The Markdown files."""
    paths = (path for path in files() if path.suffix == ".md")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def code_blocks(*languages: str) -> list[CodeBlock]:
    """The documents' code blocks in these languages."""
    return [
        CodeBlock(name, block[1], block[2], text.count("\n", 0, block.start()) + 1)
        for name, text in documents().items()
        for block in _FENCE.finditer(text)
        if block[1] in languages
    ]


def pyproject() -> dict[str, dict[str, object]]:
    """The project file, parsed."""
    return cast(
        "dict[str, dict[str, object]]", tomllib.loads((ROOT / "pyproject.toml").read_text())
    )


def packages() -> list[str]:
    """The packages inside `baton`."""
    return sorted(p.parent.name for p in (ROOT / "platform/baton").glob("*/__init__.py"))
