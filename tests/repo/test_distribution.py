"""What is installed by which name: the commands that messages print, run on our own wheel."""

from __future__ import annotations

import email
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import cast

import pytest

from baton.domain.names.distribution import DISTRIBUTION, pip_install, pip_install_engine
from tests.repo.project import ROOT, pyproject

EXTRAS = tuple(cast("dict[str, object]", pyproject()["project"]["optional-dependencies"]))
_CALL = re.compile(r"\bpip_install\(\s*['\"](\w+)['\"]")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(folder), str(ROOT))
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=300)
    return folder


def named_extras() -> set[str]:
    """The extras of every installation that a message of the platform names."""
    texts = [path.read_text() for path in (ROOT / "platform").rglob("*.py")]
    return {extra for text in texts for extra in _CALL.findall(text)} | {"cpu", "gpu"}


def test_the_project_has_the_name_that_messages_give_it() -> None:
    assert pyproject()["project"]["name"] == DISTRIBUTION


def test_no_message_names_the_other_project_of_our_name() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "platform").rglob("*.py")
        if re.search(r"(?<![\w-])baton\[\w+\]", path.read_text())
    ]
    assert found == []


@pytest.mark.slow
def test_messages_name_extras_that_the_wheel_has(wheels: Path) -> None:
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        provided = email.message_from_bytes(archive.read(metadata)).get_all("Provides-Extra")
    assert {"report", "otel"} < named_extras() <= set(provided or ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*map(pip_install, EXTRAS), *pip_install_engine().split(" or ")]
)
def test_an_installation_that_a_message_names_is_of_this_wheel(command: str, wheels: Path) -> None:
    program, *words = shlex.split(command)
    assert program == "pip"
    # Without dependencies: they are gigabytes, and the locks' tests install them.
    options = (
        "--dry-run",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
        "--find-links",
        str(wheels),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"Would install {DISTRIBUTION}-" in done.stdout
