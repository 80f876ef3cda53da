"""A toolkit of CUDA that is laid out of wheels, and what is said where nothing can be compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.engine.cuda_home import CannotCompileError, check_compilers, create_toolkit


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """What the wheels put down, as far as it is looked at."""
    program(tmp_path / "cu13" / "bin" / "nvcc")
    (tmp_path / "cu13" / "include").mkdir()
    (tmp_path / "cu13" / "lib").mkdir()
    (tmp_path / "cu13" / "lib" / "libcudart.so.13").write_bytes(b"")
    (tmp_path / "cu13" / "lib" / "libcudart_static.a").write_bytes(b"")
    return tmp_path / "cu13"


def compilers() -> dict[str, str]:
    """Variables with which the compiler of this machine is found, and no nvcc."""
    found = shutil.which("g++")
    assert found, "no g++ was found: apt-get install g++"
    return {"PATH": str(Path(found).parent)}


def test_a_toolkit_has_names_to_link_against_and_a_driver_to_find_later(
    kit: Path, tmp_path: Path
) -> None:
    home = tmp_path / "deep" / "cuda"
    create_toolkit(kit, home, compilers())
    assert (home / "bin" / "nvcc").resolve() == kit / "bin" / "nvcc"
    assert (home / "include").is_dir()
    assert (home / "lib64" / "libcudart.so").resolve() == kit / "lib" / "libcudart.so.13"
    assert (home / "lib64" / "libcudart_static.a").exists()
    assert (home / "lib64" / "stubs" / "libcuda.so").stat().st_size > 0
    assert check_compilers({**compilers(), "CUDA_HOME": str(home)}) == home / "bin" / "nvcc"
    with pytest.raises(FileExistsError):
        create_toolkit(kit, home, compilers())


def test_nvcc_is_looked_for_as_flashinfer_does(tmp_path: Path) -> None:
    gxx, said = program(tmp_path / "a" / "g++"), program(tmp_path / "b" / "bin" / "nvcc")
    usual = program(tmp_path / "c" / "bin" / "nvcc")
    path = {"PATH": str(gxx.parent)}
    assert check_compilers(path, usual.parents[1]) == usual
    on_path = program(gxx.parent / "nvcc")
    assert check_compilers(path, usual.parents[1]) == on_path
    assert check_compilers({**path, "CUDA_HOME": str(said.parents[1])}, usual.parents[1]) == said


def test_what_is_missing_is_said_with_the_command_that_mends_it(tmp_path: Path) -> None:
    with pytest.raises(CannotCompileError, match=r"no g\+\+.*apt-get install g\+\+"):
        check_compilers({"PATH": str(tmp_path)}, tmp_path)
    program(tmp_path / "g++")
    with pytest.raises(CannotCompileError, match=r"no nvcc.*baton\.engine\.cuda_home ~/cuda"):
        check_compilers({"PATH": str(tmp_path)}, tmp_path)
    with pytest.raises(CannotCompileError, match=r"no g\+\+"):
        create_toolkit(tmp_path, tmp_path / "cuda", {"PATH": str(tmp_path / "none")})
