"""Artefacts with one word misspelt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


class Typo(NamedTuple):
    """One word in one file."""

    target: str
    file: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.target}/{self.file}: {self.wrong}"

    def plant(self, example: Path, folder: Path) -> Path:
        """A copy of this form's artefacts with the typo in it, once."""
        copy = folder / self.target
        shutil.copytree(example / self.target, copy)
        text = (copy / self.file).read_text()
        assert self.right in text, f"{self.file} has no {self.right!r} to misspell"
        (copy / self.file).write_text(text.replace(self.right, self.wrong, 1))
        return copy
