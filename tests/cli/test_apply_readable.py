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


def test_changes_stand_under_what_they_take_and_the_outcome_comes_last() -> None:
    assert apply_lines(APPLIED) == [
        "live:",
        "  slo.default.ttft: null -> 1s",
        "  router.seed: 0 -> 1",
        "pool size:",
        "  pools.decode.replicas.initial: 2 -> 3",
        "decode: 2 -> 3 replicas",
        "prefill: replicas replaced one by one",
        "applied as generation 4 in 0.12 s",
    ]


def test_histograms_that_begin_new_series_are_named_below_the_changes() -> None:
    histograms = ["baton_held_seconds: +45 s, -2 s"]
    lines = apply_lines({**APPLIED, "changes": CHANGES[:1], "histograms": histograms})
    assert lines[:4] == [
        "live:",
        "  slo.default.ttft: null -> 1s",
        "histograms with other edges, which begin new series (label edges):",
        "  baton_held_seconds: +45 s, -2 s",
    ]


def test_what_a_model_hands_on_to_its_pools_is_shown_where_it_takes_something() -> None:
    changes = [
        {"reload": "live", "change": "models.tiny.engine.max_num_seqs: 64 -> 32"},
        {"reload": "live", "change": "models.tiny.engine.seed: 1 -> 2"},
        {"reload": "rolling", "change": "pools.decode.engine.max_num_seqs: 64 -> 32"},
    ]
    assert apply_lines({**APPLIED, "changes": changes})[:4] == [
        "live:",
        "  models.tiny.engine.seed: 1 -> 2",
        "rolling:",
        "  pools.decode.engine.max_num_seqs: 64 -> 32",
    ]


@pytest.mark.parametrize(
    ("report", "last"),
    [
        ({"changes": [], "outcome": "applied"}, "nothing differs from generation 4"),
        ({"outcome": "shown"}, "nothing has changed, generation 4 holds"),
        (
            {"outcome": "dry run"},
            "everybody could take it; nothing has changed, generation 4 holds",
        ),
        ({"outcome": "restarted", "endpoint": "http://h:1"}, "started again at http://h:1"),
    ],
)
def test_the_outcome_is_said_in_one_line(report: Report, last: str) -> None:
    assert apply_lines({**APPLIED, **report})[-1] == last


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


def test_a_bad_file_is_told_by_line_and_column_and_nobody_is_asked(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("slo:\n  default: {ttft: soon}\n")
    scripted = Scripted()
    result = run(scripted, "-c", SIM, "-c", str(bad))
    assert result.exit_code == 2
    assert f"{bad}:2:19: slo.default.ttft: got 'soon'" in result.stderr
    assert scripted.asked == []


def test_a_refusal_says_why_and_what_to_do() -> None:
    refused = ApplyRejected("ingress: cannot use 'own:choose'", "put that right, apply again")
    result = run(Scripted(refused), "-c", SIM)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2:] == [
        "error: ingress: cannot use 'own:choose'",
        "next: put that right, apply again",
    ]
