"""`python -m baton.telemetry.dashboards --write dashboards`: make the dashboards' files anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.telemetry.dashboards.boards import boards


def main() -> int:
    """Write every dashboard; says what it wrote."""
    parser = argparse.ArgumentParser(prog="python -m baton.telemetry.dashboards")
    parser.add_argument("--write", type=Path, required=True, metavar="DIR", help="where to")
    folder: Path = parser.parse_args().write
    from baton.telemetry.dashboards.grafana import to_json

    for board in boards():
        path = folder / f"{board.name}.json"
        path.write_bytes(to_json(board))
        sys.stderr.write(f"{path}: {sum(1 for _ in board.panels())} panels\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
