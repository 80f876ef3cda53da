"""`baton fit`, which is deprecated: it says which verb to use, and runs it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from baton.cli.main import build_app
from tests.cli.test_calibrate_rows import PLAIN, written

MODEL = ("llama-3.1-8b", "--gpu", "H100", "--tp", "2", "-o", "json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments)


def test_a_model_goes_to_size() -> None:
    result = run("fit", *MODEL)
    assert result.stderr == "warning: baton fit: deprecated, use baton size\n"
    assert result.stdout == run("size", *MODEL).stdout


def test_measurements_go_to_calibrate_with_the_former_option(tmp_path: Path) -> None:
    rows = written(tmp_path, PLAIN)
    result = run("fit", rows, "--calibrate", rows, "--json")
    assert "warning: baton fit: deprecated, use baton calibrate\n" in result.stderr
    assert result.stdout == run("calibrate", rows, "--calibration", rows, "--json").stdout


def test_an_error_of_the_verb_keeps_its_status() -> None:
    assert run("fit", "no/such-model", "--gpu", "H100").exit_code == 1
    assert run("fit", "llama-3.1-8b").exit_code == 2


def test_help_does_not_list_it_and_names_its_successors() -> None:
    assert "\n  fit " not in run("--help").stdout
    assert "`baton size`" in run("fit", "--help").stdout
