"""What a custom policy may import: documented, there, and enough for every example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from baton.config.schema import routing as schema_routing
from baton.config.schema import scaling as schema_scaling
from tests.repo.project import ROOT, code_blocks, documents

PAGE = "docs/operations/policies.md"
_ROW = re.compile(r"^\| `(baton[\w.]*)` \| (.+?) \|", re.MULTILINE)


def stable() -> dict[str, set[str]]:
    """The documented names of each module."""
    rows = _ROW.findall(documents()[PAGE])
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def sources() -> dict[str, str]:
    """Every policy that the page shows or names."""
    shown = {str(block): block.text for block in code_blocks("python") if block.file == PAGE}
    files = sorted((ROOT / "benchmarks" / "policies").glob("*.py"))
    return shown | {file.name: file.read_text() for file in files}


def imported(source: str) -> Iterator[tuple[str, str]]:
    """What a module takes from baton."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("baton") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("baton"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_there_are_shown_policies_and_examples() -> None:
    assert len(stable()) >= 10
    assert len(sources()) >= 10


@pytest.mark.parametrize("module", stable())
def test_a_documented_name_is_there(module: str) -> None:
    assert all(hasattr(import_module(module), name) for name in stable()[module])


@pytest.mark.parametrize("name", sources())
def test_a_policy_imports_documented_names_only(name: str) -> None:
    assert not [
        (module, what)
        for module, what in imported(sources()[name])
        if what not in stable().get(module, set())
    ]


def test_each_example_is_documented_and_takes_the_place_of_a_name() -> None:
    named = set(re.findall(r"^\| `(benchmarks\.policies\.\S+)`", documents()[PAGE], re.MULTILINE))
    moved = schema_routing.MOVED_POLICIES, schema_scaling.MOVED_POLICIES
    assert named == {place for places in moved for place in places.values()}
