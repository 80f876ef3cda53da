"""`python -m tests.reference`: write the reference anew, from the code that it is about."""

from __future__ import annotations

import sys

from tests.reference.pages import PAGES, ROOT


def main() -> int:
    """Write every page that says something else now; the exit status."""
    for name, page in PAGES.items():
        file, text = ROOT / name, page()
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            sys.stdout.write(f"written: {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
