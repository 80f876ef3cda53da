"""The import contracts hold, and each of them notices when it is broken."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from tests.repo.project import ROOT, packages, pyproject

LAYERS = "Imports go one way, and siblings do not import each other"


def contracts() -> list[dict[str, object]]:
    tool = cast("dict[str, dict[str, list[dict[str, object]]]]", pyproject()["tool"])
    return tool["importlinter"]["contracts"]


def rows() -> list[list[str]]:
    """The layers from top to bottom; siblings share a row."""
    (layers,) = (contract for contract in contracts() if contract["id"] == "layers")
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


@pytest.mark.slow
@pytest.mark.thorough
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


@pytest.mark.slow
@pytest.mark.thorough
def test_a_package_without_a_layer_breaks_the_layers(tree: Path) -> None:
    (tree / "platform/baton/stowaway").mkdir()
    (tree / "platform/baton/stowaway/__init__.py").write_text("")

    status, output = lint(tree)

    assert status == 1
    assert f"{LAYERS} BROKEN" in output or "stowaway" in output


@pytest.mark.slow
@pytest.mark.thorough
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


# -------------------------------------------------------------------------------------- rooms


def room_contracts() -> list[dict[str, object]]:
    """The contract of each package whose rooms have an order."""
    return [contract for contract in contracts() if str(contract["id"]).startswith("rooms-")]


def upward_imports(contract: dict[str, object]) -> dict[str, list[str]]:
    """For each room all those above it, by their full names."""
    (container,) = cast("list[str]", contract["containers"])
    ranks = [row.split(" | ") for row in cast("list[str]", contract["layers"])]
    above: list[str] = []
    found: dict[str, list[str]] = {}
    for row in ranks:
        found |= {f"{container}.{room}": list(above) for room in row}
        above += [f"{container}.{room}" for room in row]
    return found


def test_every_import_of_a_room_above_breaks_the_contract_of_its_rooms(tree: Path) -> None:
    offences = {
        (room, upper)
        for contract in room_contracts()
        for room, uppers in upward_imports(contract).items()
        for upper in uppers
    }
    for room in {room for room, _ in offences}:
        folder = tree / "platform" / room.replace(".", "/")
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        uppers = sorted(upper for below, upper in offences if below == room)
        file.write_text(file.read_text() + "".join(f"\nimport {upper}" for upper in uppers))

    status, output = lint(tree)

    assert status == 1
    for contract in room_contracts():
        assert f"{contract['name']} BROKEN" in output
    assert not [pair for pair in offences if f"{pair[0]} -> {pair[1]} " not in output]


@pytest.mark.parametrize("package", ["control", "policy", "serving"])
def test_the_rooms_of_the_brain_and_of_serving_have_an_order(package: str) -> None:
    assert f"rooms-{package}" in {str(contract["id"]) for contract in room_contracts()}


_RAY_PRIVATE = re.compile(r"^ray\.(_|core\.|serve\._private|serve\.schema|util\.state)")


def ray_private_imports(folder: Path) -> set[str]:
    """The files below a folder that import what Ray promises nobody."""
    found = set()
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(_RAY_PRIVATE.match(f"{name}.") for name in names):
                found.add(str(file.relative_to(folder)))
    return found


def test_only_serving_ray_imports_private_modules_of_ray(tmp_path: Path) -> None:
    found = ray_private_imports(ROOT / "platform/baton")
    assert found
    assert {file.rpartition("/")[0] for file in found} == {"serving/ray"}
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving/offence.py").write_text("from ray.serve._private import replica\n")
    assert ray_private_imports(tmp_path) == {"serving/offence.py"}


# ------------------------------------------------------------------------------------- folders


def test_no_folder_of_the_platform_has_more_than_sixteen_files() -> None:
    counts = Counter(file.parent for file in (ROOT / "platform").rglob("*.py"))
    assert not {str(folder): count for folder, count in counts.items() if count > 16}


def test_every_package_says_in_a_sentence_what_it_holds() -> None:
    for file in (ROOT / "platform").rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert docstring.partition("\n")[0].endswith("."), file
