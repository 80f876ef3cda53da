"""Print each place of documents and code that breaks a rule: `python -m tests.prose [FILE...]`."""

# ruff: noqa: T201 - an operator reads the output

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.prose import code
from tests.prose.checked import broken, checked
from tests.prose.packages import found_in_code, is_tolerated, tolerated_counts
from tests.prose.rules import Finding


def main(names: list[str]) -> int:
    """1 after a finding. Of files that are named, no finding may wait."""
    found: Mapping[str, Iterable[Finding]]
    if names:
        texts = {name: Path(name).read_text(encoding="utf-8") for name in names}
        found = {
            name: code.findings(text) if name.endswith(".py") else broken(name, text)
            for name, text in texts.items()
        }
    else:
        found = {name: broken(name, text) for name, text in checked().items()} | {
            name: [finding for finding in every if not is_tolerated(name, finding)]
            for name, every in found_in_code().items()
        }
    count = 0
    for name, findings in found.items():
        for finding in findings:
            print(f"{name}:{finding.line}: {finding.rule}: {finding.message}")
            count += 1
    waiting = 0 if names else sum(tolerated_counts().values())
    print(f"prose: {count} findings in {len(found)} files, {waiting} in packages that are not done")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
