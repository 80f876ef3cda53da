"""Where vLLM's Rust frontend is looked for, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend.rust_frontend import (
    PATH_VARIABLE,
    PROGRAM,
    check_version,
    find_rust_frontend,
)


def program(folder: Path, says: str = "vllm-rs 0.33.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRAM
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o700)
    return path


def test_the_variable_goes_before_the_package(tmp_path: Path) -> None:
    said, package = program(tmp_path / "said"), program(tmp_path / "vllm").parent
    assert find_rust_frontend({PATH_VARIABLE: str(said)}, package=package) == said


@pytest.mark.parametrize("said", ["", "auto", "1", "True"])
def test_the_package_goes_before_the_path(tmp_path: Path, said: str) -> None:
    package, other = program(tmp_path / "vllm"), program(tmp_path / "bin")
    environ = {PATH_VARIABLE: said, "PATH": str(other.parent)}
    assert find_rust_frontend(environ, package=package.parent) == package


def test_the_path_comes_last(tmp_path: Path) -> None:
    found = program(tmp_path / "bin")
    assert find_rust_frontend({"PATH": str(found.parent)}, package=tmp_path / "vllm") == found


def test_a_variable_that_names_no_program_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    package = program(tmp_path / "vllm").parent
    with pytest.raises(EngineStartFailed, match="expected the path of an executable vllm-rs"):
        find_rust_frontend({PATH_VARIABLE: str(tmp_path / "none")}, package=package)


def test_what_cannot_be_executed_is_not_it(tmp_path: Path) -> None:
    program(tmp_path / "vllm").chmod(0o600)
    with pytest.raises(EngineStartFailed, match="nor on the PATH") as failed:
        find_rust_frontend({"PATH": ""}, package=tmp_path / "vllm")
    assert "vllm 0.33" in str(failed.value)


def test_a_version_that_was_tried_is_taken(tmp_path: Path) -> None:
    assert check_version(program(tmp_path)) == "0.33.0"


@pytest.mark.parametrize("says", ["vllm-rs 0.34.1", "something else", ""])
def test_a_version_that_nobody_has_tried_is_refused(tmp_path: Path, says: str) -> None:
    with pytest.raises(EngineStartFailed, match=r"of a version 0\.33\."):
        check_version(program(tmp_path, says))


def test_what_does_not_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="does not run"):
        check_version(tmp_path / "none")
