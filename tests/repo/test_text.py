"""The project's text names no machine's paths and no mirrors, and the locks hold hashes."""

from __future__ import annotations

import ast
import re

import pytest

from tests.repo.project import ROOT, pyproject, texts

# Put together here so that this file does not name them itself.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "opt")) + ")/")
REGISTRY = re.compile(
    r"https?://([^\s/\"']*(?:pypi|simple|artifactory|nexus|devpi|mirror)[^\s/\"']*)", re.IGNORECASE
)
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
LOCKS = ("cpu", "dev")


def lock(name: str) -> str:
    return (ROOT / f"requirements/{name}.lock").read_text()


def pins(name: str) -> dict[str, str]:
    return {package.lower().replace("_", "-"): pin for package, pin in PINNED.findall(lock(name))}


def test_no_file_names_a_path_of_a_developers_machine() -> None:
    found = [
        f"{name}: {line.strip()[:120]}"
        for name, text in texts()
        for line in text.splitlines()
        if MACHINE_PATHS.search(line)
    ]

    assert found == []


def test_no_file_names_a_package_registry_but_the_public_one() -> None:
    found = {host for _, text in texts() for host in REGISTRY.findall(text)}

    assert found <= {"pypi.org"}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_address_and_no_folder(name: str) -> None:
    settings = [line for line in lock(name).splitlines() if re.match(r"\s*--(?!hash=)", line)]

    assert settings == []
    assert "://" not in lock(name)


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_of_a_lock_has_hashes(name: str) -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", lock(name), flags=re.MULTILINE)[1:]

    assert entries
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_no_package_is_in_both_locks() -> None:
    assert pins("cpu").keys() & pins("dev").keys() == set()


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_packages_that_need_a_gpu_are_not_locked(package: str) -> None:
    assert package not in pins("cpu") | pins("dev")


def test_the_locked_torch_is_the_cpu_build() -> None:
    assert pins("cpu")["torch"].endswith("+cpu")


def test_exactly_pinned_packages_are_locked_at_that_version() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    exact = re.compile(r"([\w-]+)(?:\[\w+\])?==([\w.]+)")
    wanted = {
        pin[1]: pin[2]
        for extra in ("cpu", "dev")
        for pin in map(exact.fullmatch, extras[extra])
        if pin is not None
    }
    locked = {name: pin.split("+")[0] for name, pin in (pins("cpu") | pins("dev")).items()}

    assert wanted
    assert wanted.items() <= locked.items()


def test_marks_of_a_file_stand_before_its_first_test() -> None:
    """A file that joins another must not bring marks for tests that were there already."""
    late = [
        f"{path.relative_to(ROOT)}:{statement.lineno}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for statement in _after_first_test(ast.parse(path.read_text()))
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
    ]

    assert late == []


def _after_first_test(module: ast.Module) -> list[ast.stmt]:
    names = [getattr(statement, "name", "").lower() for statement in module.body]
    first = next((i for i, name in enumerate(names) if name.startswith("test")), len(names))
    return module.body[first:]
