"""Print each place of documents that breaks a rule: `python -m tests.prose [FILE...]`, or all."""

# ruff: noqa: T201 - whoever runs it reads what it prints

from __future__ import annotations

import sys
from pathlib import Path

from tests.prose.checked import broken, checked


def main(names: list[str]) -> int:
    """1 where anything was found."""
    texts = {name: Path(name).read_text(encoding="utf-8") for name in names} or checked()
    count = 0
    for name, text in texts.items():
        for found in broken(name, text):
            print(f"{name}:{found.line}: {found.rule}: {found.message}")
            count += 1
    print(f"prose: {count} findings in {len(texts)} documents")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
