"""What benchmark programs share: progress on stderr, result files, the last line of stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks._statistics import round_floats

RESULTS = Path(__file__).parent / "results"


def say(line: str) -> None:
    """Report progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def write(file: Path, result: Mapping[str, object]) -> None:
    """Write a result file, with rounded floats."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(round_floats(result), indent=1) + "\n")


def quote(figures: Mapping[str, object]) -> None:
    """Print the figures as one JSON object: a program's last line of stdout."""
    print(json.dumps(round_floats(figures)), flush=True)
