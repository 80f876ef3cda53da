"""The import contracts hold, and each of them notices when it is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from tests.repo.project import ROOT, packages, pyproject

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LAYERS = "Imports go one way, and siblings do not import each other"


def contracts() -> list[dict[str, object]]:
    tool = cast("dict[str, dict[str, list[dict[str, object]]]]", pyproject()["tool"])
    return tool["importlinter"]["contracts"]


def rows() -> list[list[str]]:
    """The layers from top to bottom; siblings share a row."""
    (layers,) = (contract for contract in contracts() if contract["type"] == "layers")
    return [re.split(r"\W+", row) for row in cast("list[str]", layers["layers"])]


def forbidden(package: str) -> list[str]:
    """What the package must not import by the layers: all above it, and its siblings."""
    ranks = {name: rank for rank, row in enumerate(rows()) for name in row}
    return [name for name, rank in ranks.items() if rank <= ranks[package] and name != package]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "platform", tmp_path / "platform", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"],
        cwd=tree,
        env={"PYTHONPATH": str(tree / "platform"), "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def offend(tree: Path, package: str, imports: list[str]) -> None:
    lines = "".join(f"import {name}\n" for name in imports)
    (tree / "platform/baton" / package / "offence.py").write_text(lines)


def test_the_contracts_hold(tree: Path) -> None:
    status, output = lint(tree)

    assert status == 0, output
    assert output.count(" KEPT") == len(contracts())


def test_the_layers_name_every_package() -> None:
    assert sorted(name for row in rows() for name in row) == packages()


@pytest.mark.parametrize("package", [name for row in rows()[1:] for name in row])
def test_a_package_that_imports_upwards_or_sideways_breaks_the_layers(
    tree: Path, package: str
) -> None:
    offend(tree, package, [f"baton.{name}" for name in forbidden(package)])

    status, output = lint(tree)

    assert status == 1
    assert f"{LAYERS} BROKEN" in output
    for name in forbidden(package):
        assert f"baton.{package}.offence -> baton.{name} " in output


def test_a_package_without_a_layer_breaks_the_layers(tree: Path) -> None:
    (tree / "platform/baton/stowaway").mkdir()
    (tree / "platform/baton/stowaway/__init__.py").write_text("")

    status, output = lint(tree)

    assert status == 1
    assert f"{LAYERS} BROKEN" in output or "stowaway" in output


@pytest.mark.parametrize(
    "contract",
    [pytest.param(c, id=str(c["id"])) for c in contracts() if c["type"] == "forbidden"],
)
def test_every_package_that_imports_what_it_must_not_breaks_the_contract(
    tree: Path, contract: dict[str, object]
) -> None:
    sources = [
        name.removeprefix("baton.") for name in cast("list[str]", contract["source_modules"])
    ]
    banned = cast("list[str]", contract["forbidden_modules"])
    for package in sources:
        offend(tree, package, banned)

    status, output = lint(tree)

    assert status == 1
    assert f"{contract['name']} BROKEN" in output
    for package in sources:
        for name in banned:
            assert f"baton.{package}.offence -> {name} " in output


@pytest.mark.parametrize(
    ("owner", "vendor"), [("serving", "ray"), ("engine", "vllm"), ("transfer", "nixl")]
)
def test_a_vendor_is_banned_everywhere_but_in_one_package(owner: str, vendor: str) -> None:
    (contract,) = (c for c in contracts() if c["id"] == vendor)
    sources = {
        name.removeprefix("baton.") for name in cast("list[str]", contract["source_modules"])
    }

    assert sources == set(packages()) - {owner}
