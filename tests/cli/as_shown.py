"""Output of verbs for people, kept in `shown/`; `BATON_SHOWN=write` writes the present output."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("shown")


@dataclass(frozen=True)
class AsShown:
    """Compares cases with those of a file, where a case is a heading and lines of output."""

    write: bool = False

    def __call__(self, name: str, case: str, cases: Iterable[str], lines: Iterable[str]) -> None:
        """Compare the output of one of the cases with the file, or write it there."""
        shown = _without_last_blanks(line.rstrip() for line in lines)
        file = FOLDER / f"{name}.txt"
        known = _sections(file)
        if self.write:
            known[case] = shown
            order = [title for title in cases if title in known]
            texts = ["\n".join([f"# {title}", *known[title]]) for title in order]
            file.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
            return
        assert list(known) == list(cases)
        assert shown == known[case], "if it is meant so: BATON_SHOWN=write"


def differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The lines that are gone (-) and those that came (+)."""
    return [line.rstrip() for line in difflib.ndiff(before, after) if line[0] in "+-"]


def _sections(file: Path) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        if line.startswith("# "):
            lines = sections[line.removeprefix("# ")] = []
        else:
            lines.append(line)
    return {title: _without_last_blanks(lines) for title, lines in sections.items()}


def _without_last_blanks(lines: Iterable[str]) -> list[str]:
    kept = list(lines)
    while kept and not kept[-1]:
        kept.pop()
    return kept
