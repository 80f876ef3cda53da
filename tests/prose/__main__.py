"""Print each place of documents, code, dashboards and alerts that breaks a rule.

`python -m tests.prose [FILE...]`; without a file: all of them.
"""

# ruff: noqa: T201 - an operator reads the output

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.prose import code, panels
from tests.prose.checked import broken, checked
from tests.prose.in_code import found_in_code
from tests.prose.rules import Finding


def _findings(name: str, text: str) -> Iterable[Finding]:
    match Path(name).suffix:
        case ".py":
            return code.findings(text)
        case ".json" | ".yaml":
            return panels.findings(name, text)
    return broken(name, text)


def main(names: list[str]) -> int:
    """1 after a finding."""
    found: Mapping[str, Iterable[Finding]]
    if names:
        found = {name: _findings(name, Path(name).read_text(encoding="utf-8")) for name in names}
    else:
        found = {
            **{name: broken(name, text) for name, text in checked().items()},
            **found_in_code(),
            **panels.found_in_panels(),
        }
    count = 0
    for name, findings in found.items():
        for finding in findings:
            print(f"{name}:{finding.line}: {finding.rule}: {finding.message}")
            count += 1
    print(f"prose: {count} findings in {len(found)} files")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
