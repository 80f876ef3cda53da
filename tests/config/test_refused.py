"""Configurations that are refused, with every finding: the cases of `refused.txt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.config.conftest import Refuse

FILE = Path(__file__).with_name("refused.txt")
ANCHORS = {
    "pool": "role: mixed",
    "decode": "role: decode",
    "model": "max_len: 4096",
    "engine": "kind: sim",
}
"""Where a part of a configuration says more: behind this."""


@dataclass
class Case:
    """A configuration, changed by some edits, with its findings."""

    base: str
    edits: list[str] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        text = self.base
        for edit in self.edits:
            verb, _, words = edit.partition(":")
            text = edited(text, verb, words.strip().replace("\\n", "\n"))
        return text


def edited(text: str, verb: str, words: str) -> str:
    if verb == "whole":
        return words
    if verb == "added":
        return f"{text}{words}\n"
    if verb == "instead":
        old, new = words.split(" => ")
    else:
        old = ANCHORS[verb]
        new = f"{old}, {words}"
    assert text.count(old) == 1, f"not one place to edit: {old}"
    return text.replace(old, new)


def read_cases() -> list[Case]:
    base, cases = "", [Case("")]
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            base = ""
        elif line.startswith("> "):
            base += line.removeprefix("> ") + "\n"
        elif line.startswith("    "):
            token, _, says = line.removeprefix("    ").partition(" | ")
            cases[-1].findings.append((token, says))
        elif line and not line.startswith("#"):
            if not cases[-1].edits or cases[-1].findings:
                cases.append(Case(base))
            cases[-1].edits.append(line)
    return cases[1:]


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: "; ".join(case.edits))
def test_what_cannot_be_is_refused_with_its_place_and_all_that_is_wrong(
    load_invalid: Refuse, case: Case
) -> None:
    text = case.text()
    lines = [*text.splitlines(), ""]
    found = load_invalid(text)
    assert len(found) == len(case.findings), found
    for finding, (token, says) in zip(found, case.findings, strict=True):
        _file, line, column, words = finding.split(":", 3)
        at_place = lines[int(line) - 1][int(column) - 1 :]
        begins = (at_place[: len(token)], words.strip()[: len(says)])
        assert begins == (token, says)
