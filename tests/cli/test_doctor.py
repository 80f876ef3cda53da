"""`baton doctor`: what it asks for, what a person reads, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import Result

from baton.cli.backend import Progress, Report
from baton.cli.inspect.doctor import ReportPrinter, checks_lines
from baton.cli.output import OutputFormat
from baton.config import LoadedConfig
from baton.domain.errors import OperatorError
from baton.serving.checks.result import Check, CheckStatus, Finding
from baton.serving.doctor import build_report
from tests.cli.as_shown import AsShown
from tests.cli.invoked import invoke

SIM = str(Path(__file__).parents[2] / "configs" / "sim.yaml")


def row(number: int, area: str, name: str, status: str, **more: str) -> dict[str, Any]:
    """A check as the deployment's side reports it."""
    texts = {"detail": f"{name} is so", "why": f"{name} matters", "fix": ""} | more
    finding = Finding(texts["detail"], texts["fix"])
    check = Check(name=name, status=CheckStatus(status), why=texts["why"], findings=(finding,))
    (found,) = cast("list[dict[str, Any]]", build_report([(area, [check])])["checks"])
    return found | {"number": number}


GOOD = [row(1, "machine", "versions", "PASS"), row(2, "deployment", "pools", "SKIP")]
BAD = [
    row(1, "machine", "versions", "PASS"),
    row(2, "machine", "ports", "FAIL", fix="stop it"),
    row(3, "deployment", "pairs", "WARN", fix="wait"),
]


def report(checks: list[dict[str, Any]]) -> Report:
    names = ("pass", "warn", "fail", "skip")
    counts = {name: sum(check["status"] == name.upper() for check in checks) for name in names}
    return {"ok": not counts["fail"], "counts": counts, "checks": checks}


@dataclass
class Scripted:
    """Answers with one report; remembers what it was asked."""

    checks: list[dict[str, Any]] = field(default_factory=lambda: GOOD)
    asked: list[tuple[LoadedConfig | None, str | None]] = field(default_factory=list)

    clients: list[dict[str, Any]] = field(default_factory=list)
    fails_then: bool = False
    """After the first check."""

    def doctor(
        self,
        config: LoadedConfig | None,
        *,
        address: str | None,
        progress: Progress,
        on_checks: Callable[[Report], None],
        **client: Any,  # noqa: ANN401 - how the endpoint is called
    ) -> Report:
        progress("looking")
        self.asked.append((config, address))
        self.clients.append(client)
        on_checks(report(self.checks[:1]))
        if self.fails_then:
            raise OperatorError("a disk hangs", "look at 'dmesg'")
        return report(self.checks)


def run(*arguments: str, scripted: Scripted | None = None) -> Result:
    return invoke(scripted or Scripted(), "doctor", *arguments)


SKIPPED = [row(n, "deployment", f"c{n}", "SKIP", detail="nothing runs here") for n in range(16, 29)]
CASES = {
    "checks are lines under their areas, and what is not well has its fix": (BAD, False),
    "what is well needs no reason": (GOOD, False),
    "the reasons of all checks are told on request": (GOOD, True),
    "checks that were skipped for one reason are one line": (SKIPPED, False),
}


def printed(report: Report, *, verbose: bool) -> list[str]:
    """What is printed of a report."""
    text = StringIO()
    with redirect_stdout(text):
        ReportPrinter(OutputFormat.TEXT, verbose=verbose).print_rest(report)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("case", CASES)
def test_checks_are_shown_as_written(case: str, as_shown: AsShown) -> None:
    checks, verbose = CASES[case]
    as_shown("doctor", case, CASES, printed(report(checks), verbose=verbose))


def test_a_long_cell_continues_below_itself() -> None:
    long = row(1, "machine", "memory", "PASS", detail="many words " * 20)
    first, *more = [line for line in checks_lines([long]) if "many" in line]
    assert len(more[0]) - len(more[0].lstrip()) == first.index("many")
    assert max(map(len, (first, *more))) <= 120


def test_a_failure_is_exit_1_and_the_next_step_is_on_stderr() -> None:
    result = run(scripted=Scripted(BAD))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "next: fix 2 (ports), the first of them first, then run 'baton doctor' again"
    )


def test_the_summary_has_the_worst_first() -> None:
    *_, summary = run(scripted=Scripted(BAD)).stdout.splitlines()
    assert summary == "1 failed, 1 with a warning, 1 passed"


def test_checks_are_printed_as_soon_as_they_are_there_and_once() -> None:
    assert "ports" not in run(scripted=Scripted(BAD, fails_then=True)).stdout
    assert "1  PASS  versions" in run(scripted=Scripted(BAD, fails_then=True)).stdout
    whole = run(scripted=Scripted(BAD)).stdout
    assert [whole.count(name) for name in ("PASS  versions", "FAIL  ports")] == [1, 1]


def test_json_is_printed_once_and_whole_also_where_the_rest_comes_late() -> None:
    assert run("-o", "json", scripted=Scripted(BAD, fails_then=True)).stdout == ""


def test_the_endpoint_is_called_with_the_key_of_a_file_as_by_other_verbs(tmp_path: Path) -> None:
    key, scripted = tmp_path / "key", Scripted()
    key.write_text("bt_secret\n")
    run("--url", "https://h", "--key-file", str(key), "--ca-file", "/ca.pem", scripted=scripted)
    assert scripted.clients == [
        {
            "url": "https://h",
            "headers": {"Authorization": "Bearer bt_secret"},
            "ca_file": Path("/ca.pem"),
        }
    ]


def test_warnings_alone_are_exit_0() -> None:
    assert run(scripted=Scripted([BAD[0], BAD[2]])).exit_code == 0


def test_json_is_the_whole_report_also_when_something_failed() -> None:
    result = run("-o", "json", scripted=Scripted(BAD))
    assert result.exit_code == 1
    assert json.loads(result.stdout) == report(BAD)
    assert "looking" in result.stderr


def test_a_configuration_is_handed_over_with_its_layers() -> None:
    scripted = Scripted()
    run("-c", SIM, "--set", "server.port=9001", "--address", "h:1", scripted=scripted)
    ((loaded, address),) = scripted.asked
    assert loaded is not None
    assert (loaded.config.server.port, address) == (9001, "h:1")


def test_without_a_configuration_the_machine_is_looked_at_all_the_same() -> None:
    scripted = Scripted()
    assert run(scripted=scripted).exit_code == 0
    assert scripted.asked == [(None, None)]


def test_setting_a_key_of_no_configuration_is_a_usage_error() -> None:
    assert run("--set", "server.port=1").exit_code == 2
