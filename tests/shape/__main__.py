"""How large the project is, and how far a reader has to go in it.

python -m tests.shape               count and print
python -m tests.shape --json FILE   and keep
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import grimp

from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import World, request

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "baton"
MOST_FILES = 16
"""More Python files than these in one folder are more than one takes in at a glance."""
_BRAIN = ("control", "policy", "domain", "perf")
_GENERATED = ("docs/reference/", "docs/decisions/", "docs/reliability.md")
"""Documents that are rendered, or that are a record and not to be read through."""
_TERM = re.compile(r"^\| (?!Term \|)", re.MULTILINE)


def counts() -> Mapping[str, int]:
    """Every figure, by what it counts."""
    files, functions = path_of_a_handed_off_request()
    folders = files_by_folder()
    return {
        "files of the brain that one handed-off request enters": len(files),
        "functions of the brain that it enters": len(functions),
        "modules of baton": len(_sources(PACKAGE)),
        "modules with one importer": len(modules_with_one_importer()),
        f"folders of baton with more than {MOST_FILES} files": sum(
            count > MOST_FILES for count in folders.values()
        ),
        "files in the fullest folder": max(folders.values()),
        "lines of platform/": _lines(_sources(ROOT / "platform")),
        "lines of tests/": _lines(_sources(ROOT / "tests")),
        "words of documents": sum(len(_text(path).split()) for path in documents()),
        "lines of README.md": len(_text(ROOT / "README.md").splitlines()),
        "terms of the glossary": len(_TERM.findall(_text(ROOT / "docs" / "glossary.md"))),
        "loops over 'one'": _loops_over_one(),
    }


def path_of_a_handed_off_request() -> tuple[frozenset[str], frozenset[str]]:
    """The files and the functions of the brain that run from a request's arrival to its end.

    It is prefilled on one replica, handed off, and decoded on another, with nothing going wrong;
    the fleet has joined before. By `sys.setprofile`; comprehensions and lambdas are their
    function's.
    """
    world = World(policy=PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS)))
    world.join_prefill_decode()
    tell, entered = world.handle, set[tuple[str, str]]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := _in_the_brain(frame.f_code.co_filename)):
            name = re.sub(r"(\.<locals>)?\.?<\w+>", "", frame.f_code.co_qualname)
            entered.add((path, f"{path}:{name}"))

    def watched(event: object) -> object:
        sys.setprofile(watch)
        try:
            return tell(event)  # type: ignore[arg-type]  # whatever the world tells
        finally:
            sys.setprofile(None)

    world.handle = watched  # type: ignore[assignment]
    world.coordinator.check_integrity = lambda: None  # type: ignore[method-assign]
    world.arrive(request("r", prompt_tokens=200, max_tokens=3))
    world.run_to_end()
    assert world.records["r"].handed_off_blocks > 0, "it was not handed off"
    return frozenset(path for path, _ in entered), frozenset(name for _, name in entered)


def modules_with_one_importer() -> Sequence[str]:
    """Modules that exactly one other imports; packages' own files are not counted."""
    graph = grimp.build_graph("baton", cache_dir=None)
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in _sources(PACKAGE)
    }
    return sorted(
        module
        for module in modules & graph.modules
        if len(graph.find_modules_that_directly_import(module)) == 1
    )


def files_by_folder() -> Mapping[str, int]:
    """The number of Python files of each folder."""
    return Counter(str(path.parent.relative_to(PACKAGE)) for path in _sources(PACKAGE))


def documents() -> Sequence[Path]:
    """Documents but records and rendered ones."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    kept = (path for path in found if not str(path.relative_to(ROOT)).startswith(_GENERATED))
    return sorted(path for path in kept if path.name != "CHANGELOG.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was counted."""
    parser = argparse.ArgumentParser(prog="tests.shape", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    found = counts()
    for what, count in found.items():
        sys.stdout.write(f"{count:>8,}  {what}\n")
    for folder, count in files_by_folder().items():
        if count > MOST_FILES:
            sys.stdout.write(f"{count:>8,}  files in {folder}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _in_the_brain(filename: str) -> str:
    path = Path(filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    inside = path.relative_to(PACKAGE)
    return str(inside) if inside.parts[0] in _BRAIN else ""


def _sources(folder: Path) -> Sequence[Path]:
    return [
        path for path in folder.rglob("*.py") if path.name not in {"__init__.py", "__main__.py"}
    ]


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(_text(path).splitlines()) for path in paths)


def _loops_over_one() -> int:
    folders: Callable[[str], Path] = ROOT.joinpath
    paths = [
        path for name in ("platform", "tests", "benchmarks") for path in folders(name).rglob("*.py")
    ]
    loops = (
        loop
        for path in paths
        for loop in ast.walk(ast.parse(_text(path)))
        if isinstance(loop, ast.For | ast.AsyncFor | ast.comprehension)
    )
    return sum(isinstance(loop.target, ast.Name) and loop.target.id == "one" for loop in loops)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
