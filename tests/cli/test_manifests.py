"""`baton manifests export`: what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.backend import Backend
from baton.cli.main import build_app
from baton.cli.setup.export_files import TARGETS
from baton.manifests.export import Target
from tests.cli.invoked import run_baton

CONFIG = "version: 1\nmodel: {source: org/model}\npools: {decode: {role: mixed}}\n"


def export(folder: Path, *more: str, text: str = CONFIG) -> Result:
    path = folder / "config.yaml"
    path.write_text(text)
    return run_baton("manifests", "export", "-c", path, "--out", folder / "out", *more)


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
def test_an_unrenderable_configuration_is_explained_and_nothing_is_written(
    tmp_path: Path, options: list[str], said: str
) -> None:
    result = export(tmp_path, "--target", "kuberay", *options)
    assert result.exit_code != 0
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- dashboards and rules


FILES = {"slo.json": b"{}\n", "provisioning/baton.yaml": b"apiVersion: 1\n"}


def run(*arguments: str) -> Result:
    seam = Backend(
        dashboards=lambda: FILES, rules=lambda base: {"alerts.yaml": (base or "none").encode()}
    )
    return CliRunner().invoke(build_app(), arguments, obj=seam)


def export_files(folder: Path, *more: str) -> Result:
    return run("dashboards", "export", str(folder), *more)


def test_dashboards_are_written_and_named_one_a_line(tmp_path: Path) -> None:
    result = export_files(tmp_path / "new")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [str(tmp_path / "new" / name) for name in FILES]
    assert "2 files written" in result.stderr
    assert {name: (tmp_path / "new" / name).read_bytes() for name in FILES} == FILES


def test_files_that_differ_are_not_replaced_and_nothing_else_is_written(tmp_path: Path) -> None:
    mine = tmp_path / "slo.json"
    mine.write_bytes(b"mine")
    result = export_files(tmp_path)
    assert result.exit_code == 1
    assert mine.read_bytes() == b"mine"
    assert not (tmp_path / "provisioning").exists()
    assert result.stderr.splitlines() == [
        f"error: {tmp_path}: 1 of 2 files differ: slo.json",
        "next: write to another folder, or replace them with --force",
    ]


def test_they_are_replaced_with_force(tmp_path: Path) -> None:
    (tmp_path / "slo.json").write_bytes(b"mine")
    report = json.loads(export_files(tmp_path, "--force", "-o", "json").stdout)
    assert report["replaced"] == ["slo.json"]
    assert (tmp_path / "slo.json").read_bytes() == FILES["slo.json"]


def test_files_that_are_the_same_are_left_as_they_are(tmp_path: Path) -> None:
    export_files(tmp_path)
    before = (tmp_path / "slo.json").stat().st_mtime_ns
    report = json.loads(export_files(tmp_path, "-o", "json").stdout)
    assert (report["written"], report["unchanged"]) == ([], list(FILES))
    assert (tmp_path / "slo.json").stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_made_is_said_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    result = export_files(tmp_path / "file")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "next: " in result.stderr


def test_alerts_link_to_the_runbooks_that_were_named(tmp_path: Path) -> None:
    run("rules", "export", str(tmp_path), "--runbook-base", "https://wiki/baton")
    assert (tmp_path / "alerts.yaml").read_bytes() == b"https://wiki/baton"
