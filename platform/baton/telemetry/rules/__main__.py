"""`python -m baton.telemetry.rules --write DIR`: make the rule files anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.telemetry.rules.render import files


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every rule file into a folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m baton.telemetry.rules", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--runbook-base",
        metavar="URL",
        help="URL of a copy of the runbooks, to which alerts link",
    )
    args = parser.parse_args(arguments)
    folder: Path = args.write
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files(runbook_base=args.runbook_base).items():
        (folder / name).write_bytes(content)
        sys.stdout.write(f"{folder / name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
