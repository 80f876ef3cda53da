"""`baton apply`: what it asks of serving, and what it prints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import Result

from baton.cli.backend import Progress, Report
from baton.cli.run.rollout_options import apply_lines
from baton.config import LoadedConfig
from baton.domain.errors import ApplyRejected
from baton.serving.rollout.ports import ApplyOptions
from tests.cli.as_shown import AsShown
from tests.cli.invoked import invoke

SIM = str(Path(__file__).parents[2] / "configs" / "sim.yaml")
CHANGES = [
    {"reload": "live", "change": "slo.default.ttft: null -> 1s"},
    {"reload": "live", "change": "router.seed: 0 -> 1"},
    {"reload": "pool size", "change": "pools.decode.replicas.initial: 2 -> 3"},
]
APPLIED: Report = {
    "outcome": "applied",
    "generation": 4,
    "changes": CHANGES,
    "resized": {"decode": [2, 3]},
    "replaced": ["prefill"],
    "took_s": 0.1234,
}


@dataclass
class Scripted:
    """Answers `apply` with one report or one error, and remembers what it was asked."""

    answer: Report | Exception = field(default_factory=lambda: APPLIED)
    asked: list[tuple[LoadedConfig, ApplyOptions]] = field(default_factory=list)

    def apply(self, config: LoadedConfig, options: ApplyOptions, *, progress: Progress) -> Report:
        progress("asking")
        self.asked.append((config, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(scripted: Scripted, *arguments: str) -> Result:
    return invoke(scripted, "apply", *arguments)


HANDED_ON = [
    {"reload": "live", "change": "models.tiny.engine.max_num_seqs: 64 -> 32"},
    {"reload": "live", "change": "models.tiny.engine.seed: 1 -> 2"},
    {"reload": "rolling", "change": "pools.decode.engine.max_num_seqs: 64 -> 32"},
]
CASES: dict[str, Report] = {
    "changes stand under what they take, and the outcome comes last": APPLIED,
    "histograms that begin new series are named below the changes": {
        **APPLIED,
        "changes": CHANGES[:1],
        "histograms": ["baton_held_seconds: +45 s, -2 s"],
    },
    "what a model hands on to its pools is shown where it takes something": {
        **APPLIED,
        "changes": HANDED_ON,
    },
    "nothing differs": {**APPLIED, "changes": []},
    "shown alone": {**APPLIED, "outcome": "shown"},
    "a dry run": {**APPLIED, "outcome": "dry run"},
    "started again": {**APPLIED, "outcome": "restarted", "endpoint": "http://h:1"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_shown_as_written(case: str, as_shown: AsShown) -> None:
    as_shown("apply", case, CASES, apply_lines(CASES[case]))


def test_the_file_is_loaded_with_its_layers_and_everything_asked_for_is_passed_on() -> None:
    scripted = Scripted()
    result = run(scripted, "-c", SIM, "--set", "router.seed=7", "--address", "h:1", "--dry-run")
    assert result.exit_code == 0, result.output
    ((loaded, options),) = scripted.asked
    assert loaded.config.router.seed == 7
    assert options == ApplyOptions(dry_run=True, address="h:1")
    run(scripted, "-c", SIM, "--diff", "--allow-restart", "--timeout", "90s")
    assert scripted.asked[-1][1] == ApplyOptions(diff=True, allow_restart=True, timeout_s=90)


def test_json_is_one_object_on_stdout() -> None:
    result = run(Scripted(), "-c", SIM, "-o", "json")
    assert json.loads(result.stdout) == APPLIED


def test_a_bad_file_is_located_by_line_and_column_without_a_deployment(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("slo:\n  default: {ttft: soon}\n")
    scripted = Scripted()
    result = run(scripted, "-c", SIM, "-c", str(bad))
    assert result.exit_code == 2
    assert f"{bad}:2:19: slo.default.ttft: got 'soon'" in result.stderr
    assert scripted.asked == []


def test_a_refusal_has_a_reason_and_a_remedy() -> None:
    refused = ApplyRejected("ingress: cannot use 'own:choose'", "put that right, apply again")
    result = run(Scripted(refused), "-c", SIM)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2:] == [
        "error: ingress: cannot use 'own:choose'",
        "next: put that right, apply again",
    ]
