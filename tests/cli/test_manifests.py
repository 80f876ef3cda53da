"""`baton manifests export`: what is written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.backend import Backend
from baton.cli.main import build_app
from baton.cli.setup.export_files import TARGETS
from baton.manifests.export import Target

CONFIG = "version: 1\nmodel: {source: org/model}\npools: {decode: {role: mixed}}\n"


def export(folder: Path, *more: str, text: str = CONFIG) -> Result:
    path = folder / "config.yaml"
    path.write_text(text)
    words = ["manifests", "export", "-c", str(path), "--out", str(folder / "out"), *more]
    return CliRunner().invoke(build_app(), words, obj=Backend(environ={}))


def test_the_files_are_written_and_named_one_a_line(tmp_path: Path) -> None:
    result = export(tmp_path, "--target", "ray")
    assert result.exit_code == 0
    out = tmp_path / "out"
    names = ("cluster.yaml", "serve-anywhere.yaml", "serve.yaml")
    assert sorted(result.stdout.splitlines()) == [str(out / name) for name in names]
    assert "serve deploy" in result.stderr


def test_files_that_differ_are_not_replaced_without_force(tmp_path: Path) -> None:
    export(tmp_path, "--target", "docker")
    mine = tmp_path / "out" / "Dockerfile.cpu"
    mine.write_text("mine")
    result = export(tmp_path, "--target", "docker")
    assert result.exit_code == 1
    assert mine.read_text() == "mine"
    assert export(tmp_path, "--target", "docker", "--force").exit_code == 0
    assert mine.read_text() != "mine"


def test_an_unknown_target_is_a_wrong_use_and_all_are_named(tmp_path: Path) -> None:
    result = export(tmp_path, "--target", "nomad")
    assert result.exit_code == 2
    assert all(target in result.stderr for target in Target)


def test_the_command_line_knows_every_target() -> None:
    assert set(TARGETS) == set(Target)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "pools.decode.rôle=x"], "unknown key"),
        (["--name", "Not A Name"], "--name"),
        (["--gpus-per-node", "0"], "--gpus-per-node"),
        (["--image", ""], "--image"),
    ],
)
def test_what_cannot_be_rendered_is_said_and_nothing_is_written(
    tmp_path: Path, options: list[str], said: str
) -> None:
    result = export(tmp_path, "--target", "kuberay", *options)
    assert result.exit_code != 0
    assert said in result.stderr
    assert not (tmp_path / "out").exists()
