"""`platform/` is a source root, and the standard library's `platform` stays what it is."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import baton
from baton.domain.names.distribution import DISTRIBUTION
from tests.repo.project import ROOT, packages


def test_the_source_root_is_not_a_package() -> None:
    assert not (ROOT / "platform/__init__.py").exists()


def test_import_platform_finds_the_standard_library_even_from_the_project_folder() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import platform; print(platform.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout

    assert Path(found.strip()).parent == Path(sysconfig.get_path("stdlib"))


def test_the_tests_run_against_this_tree() -> None:
    assert Path(str(baton.__file__)) == ROOT / "platform/baton/__init__.py"


def test_the_installed_version_is_the_package_version() -> None:
    assert metadata.version(DISTRIBUTION) == baton.__version__


def test_the_changelog_knows_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] == "Unreleased"
    assert baton.__version__ in headings


def test_every_package_says_in_one_sentence_what_it_is() -> None:
    for name in packages():
        first = (ROOT / f"platform/baton/{name}/__init__.py").read_text().splitlines()[0]

        assert re.fullmatch(r'"""[A-Z].*\."""', first) or first.startswith('"""'), name
        assert len(first) > len('""""""'), name
