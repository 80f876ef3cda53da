"""Whether the same events still give the same commands.

python -m tests.recorded                    compare with digests.json
python -m tests.recorded --case 'walk*'     some cases
python -m tests.recorded --lines FOLDER     write every line, to compare two versions with diff
python -m tests.recorded --write            take what is now for what is right
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.recorded.cases import CASES
from tests.recorded.recorder import CHECKED_EVERY, Digest, Recorder, recording

FILE = Path(__file__).with_name("digests.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 1 when one of them came out otherwise."""
    parser = argparse.ArgumentParser(prog="tests.recorded", description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="or a pattern")
    parser.add_argument("--lines", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    patterns = options.case or ["*"]
    chosen = [name for name in CASES if any(fnmatchcase(name, pattern) for pattern in patterns)]
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    made = {name: asdict(recorded(name, options.lines)) for name in chosen}
    if options.write:
        FILE.write_text(json.dumps(known | made, indent=1) + "\n")
    wrong = list(differences(known, json.loads(json.dumps(made))))
    sys.stdout.writelines(f"{line}\n" for line in wrong or [f"{len(made)} cases as recorded"])
    return 1 if wrong and not options.write else 0


def recorded(name: str, lines: Path | None = None) -> Digest:
    """Run one case; its lines go into a file of the folder."""
    recorder = Recorder()
    with ExitStack() as stack:
        if lines is not None:
            lines.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((lines / f"{name.replace(' ', '-')}.txt").open("w"))
            recorder.on_lines.append(file.write)
        with recording(recorder):
            CASES[name]()
    return recorder.digest()


def differences(
    known: Mapping[str, Mapping[str, Any]], made: Mapping[str, Mapping[str, Any]]
) -> Iterable[str]:
    """What came out otherwise, and from which call on."""
    for name, now in made.items():
        before = known.get(name)
        if before is None:
            yield f"{name}: not recorded yet; record it on the code that is right with --write"
        elif before != now:
            yield f"{name}: {_where(before, now)}"


def _where(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    pairs = zip(before["checkpoints"], now["checkpoints"], strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    counts = {
        name: (before["orders"].get(name, 0), now["orders"].get(name, 0))
        for name in before["orders"].keys() | now["orders"].keys()
    }
    other = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in sorted(counts.items()) if a != b)
    return (
        f"{before['calls']} calls before, {now['calls']} now; alike up to {alike * CHECKED_EVERY}; "
        f"commands: {other or 'as many of each'}; compare the lines of both versions with --lines"
    )


if __name__ == "__main__":
    sys.exit(main())
