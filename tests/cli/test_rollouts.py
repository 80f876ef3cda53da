"""`baton rollback`, `baton upgrade`, `baton history`: what they ask, and what they print."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import cast

import pytest
from typer.testing import Result

from baton.cli.backend import Progress, Report
from baton.cli.inspect.history import text_report as history_rows
from baton.cli.inspect.status import text_report as status_of
from baton.cli.run.upgrade import report_lines
from baton.domain.errors import ApplyRejected
from baton.serving.rollout.ports import ApplyOptions
from baton.serving.store.config_store import GenerationRecord, GenerationStatus
from tests.cli.invoked import invoke

DONE: Report = {
    "outcome": "applied",
    "generation": 5,
    "changes": [{"reload": "live", "change": "slo.default.ttft: 2.0 -> 1.0"}],
    "resized": {},
    "replaced": ["decode"],
    "reason": ["decode: 0% of legs failed, and no replica ended"],
    "code": ["0.1.0", "0.2.0"],
    "took_s": 12.3,
}


@dataclass
class Scripted:
    """Answers with one report or one error, and remembers what it was asked."""

    answer: Report | Exception = field(default_factory=lambda: DONE)
    asked: list[object] = field(default_factory=list)

    def rollback(self, to: int | None, options: ApplyOptions, *, progress: Progress) -> Report:
        return self._told(to, options)

    def upgrade(self, options: ApplyOptions, *, progress: Progress) -> Report:
        return self._told(options)

    def history(self, *, address: str | None) -> Report:
        return self._told(address)

    def _told(self, *asked: object) -> Report:
        self.asked += asked
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(scripted: Scripted, *arguments: str) -> Result:
    return invoke(scripted, *arguments)


def test_one_goes_back_to_the_last_good_generation_or_to_one_by_its_number() -> None:
    scripted = Scripted()
    result = run(scripted, "rollback")
    assert result.exit_code == 0, result.output
    assert scripted.asked == [None, ApplyOptions()]
    assert result.stdout.splitlines()[-3:] == [
        "decode: replicas replaced one by one",
        "decode: 0% of legs failed, and no replica ended",
        "applied as generation 5 in 12.30 s",
    ]
    run(scripted, "rollback", "--to", "3", "--no-wait", "--no-rollback", "--bake", "1m")
    assert scripted.asked[2:] == [3, ApplyOptions(wait=False, rollback=False, bake_s=60)]


def test_a_reverted_change_is_a_failure_with_a_reason() -> None:
    refused = ApplyRejected("rolled back, generation 2 is as before: it did not start", "look")
    for verb in ("rollback", "upgrade"):
        result = run(Scripted(refused), verb)
        assert (result.exit_code, "did not start" in result.stderr) == (1, True)
        assert "next: look" in result.stderr


def test_a_version_is_rolled_out_with_its_options_and_told_before_and_after() -> None:
    scripted = Scripted({**DONE, "outcome": "upgraded"})
    result = run(scripted, "upgrade", "--dry-run", "--timeout", "3m", "--address", "h:1")
    assert scripted.asked == [ApplyOptions(dry_run=True, timeout_s=180, address="h:1")]
    assert result.stdout.splitlines()[-1] == "baton 0.1.0 -> 0.2.0 in 12.3 s"
    assert json.loads(run(scripted, "upgrade", "-o", "json").stdout)["code"] == ["0.1.0", "0.2.0"]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"code": None}, "what runs is of this version already"),
        ({"outcome": "dry run"}, "would replace decode; nothing has changed"),
        ({"outcome": "ordered"}, "ordered and not watched"),
    ],
)
def test_the_result_of_an_upgrade_is_one_line(report: Report, text: str) -> None:
    (line,) = report_lines({**DONE, **report})
    assert text in line


def test_generations_are_listed_with_their_fate_and_the_one_that_holds_is_marked() -> None:
    first = GenerationRecord(
        generation=0, at_s=None, operation="up", status=GenerationStatus.STARTED
    )
    second = GenerationRecord(
        generation=1,
        at_s=1e9,
        operation="apply",
        status=GenerationStatus.REVERTED,
        reason="no such key",
        author="ada@node-1",
    )
    changes = ["slo.default.ttft: 2s -> 3s", "slo.default.tpot: 50ms -> 60ms"]
    rows = [asdict(first) | {"changes": None}, asdict(second) | {"changes": changes}]
    report: Report = {"generation": 1, "baton": "0.1.0", "generations": rows}
    shown = cast("list[dict[str, str]]", history_rows(report)["generations"])
    assert [row["generation"] for row in shown] == ["0", "1 *"]
    assert (shown[0]["when"], shown[1]["when"][:4], shown[1]["reason"]) == (
        "-",
        "2001",
        "no such key",
    )
    assert [row["author"] for row in shown] == ["-", "ada@node-1"]
    assert [row["changes"] for row in shown] == ["-", f"{changes[0]} and 1 more"]
    scripted = Scripted(report)
    assert "reverted" in run(scripted, "history").stdout
    assert run(scripted, "history", "--diff").stdout.splitlines()[-3:] == [
        "generation 1, apply:",
        f"  {changes[0]}",
        f"  {changes[1]}",
    ]
    assert json.loads(run(scripted, "history", "--json").stdout) == report


def test_the_status_says_how_far_a_rollout_is() -> None:
    progress = {"what": "apply", "generation": 3, "state": "in progress", "age_s": 12.0}
    for key in ("reason", "why"):  # an earlier build stores the latter
        rollout = {**progress, key: "replacing decode"}
        report: Report = {"ingresses": [], "members": [], "rollout": rollout}
        assert status_of(report)["rollout"] == (
            "apply, generation 3, in progress 12 s ago: replacing decode"
        )
    assert "rollout" not in status_of({"ingresses": [], "members": []})
