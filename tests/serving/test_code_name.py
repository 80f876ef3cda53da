"""Code is another where its files are, whatever its version says, and wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import baton
from baton.serving.versions import code_version, content_hash

OURS = Path(baton.__file__).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OURS, tmp_path / "elsewhere" / "baton"))


def test_its_name_is_the_version_and_the_content_of_what_runs() -> None:
    assert code_version() == f"{baton.__version__}+{content_hash(OURS)}"


def test_a_copy_elsewhere_is_the_same_code(copy: Path) -> None:
    assert content_hash(copy) == content_hash(OURS)


def test_what_python_and_packagers_leave_beside_it_is_no_part_of_it(copy: Path) -> None:
    (copy / "serving" / "__pycache__").mkdir(exist_ok=True)
    (copy / "serving" / "__pycache__" / "app.cpython-311.pyc").write_bytes(b"x")
    (copy / "telemetry" / "dashboards" / "files").mkdir(parents=True, exist_ok=True)
    (copy / "telemetry" / "dashboards" / "files" / "goodput.json").write_text("{}")
    assert content_hash(copy) == content_hash(OURS)


@pytest.mark.parametrize(
    "file", ["serving/shared/names.py", "console/static/app.js", "__init__.py"]
)
def test_one_line_more_is_other_code(copy: Path, file: str) -> None:
    with (copy / file).open("a") as more:
        more.write("// or #\n")
    assert content_hash(copy) != content_hash(OURS)


def test_a_file_that_goes_or_is_called_otherwise_is_other_code(copy: Path) -> None:
    (copy / "serving/shared/names.py").rename(copy / "serving/shared/other_names.py")
    moved = content_hash(copy)
    (copy / "serving/shared/other_names.py").unlink()
    assert len({moved, content_hash(copy), content_hash(OURS)}) == 3
