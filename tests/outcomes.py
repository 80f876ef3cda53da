"""What became of each test over several runs of pytest, and whether all that was skipped may be.

A test may be skipped in one run and not in another: in the environment for GPUs, before a tool was
fetched, against another engine. So each run keeps what it saw in the folder that BATON_OUTCOMES
names, and in the end `python -m tests.outcomes FOLDER` looks at all of them together. What was
skipped wherever it came up must be one of `ALLOWED_SKIPS`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

OUTCOMES_ENV = "BATON_OUTCOMES"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


class AllowedSkip(NamedTuple):
    """Something that a machine without it cannot be tested for."""

    tests: str
    """A regular expression for whole names of tests, `file::test[parameters]`."""
    reason: str
    """A regular expression for a part of why they are skipped."""
    missing: str


ALLOWED_SKIPS: Sequence[AllowedSkip] = (
    AllowedSkip(r"tests/engine/test_one_gpu\.py::.*", r"no NVIDIA GPU", "a GPU"),
    AllowedSkip(
        r".*", r"BATON_TRACES names no folder", "recorded traces, which are not in the project"
    ),
    AllowedSkip(
        r"tests/engine/test_vllm_features\.py::.*", r"only with AVX-512", "the CPU's AVX-512"
    ),
    AllowedSkip(
        r"tests/(chaos|cluster)/.*", r"namespace|network|mount|nft|tc ", "rights on the kernel"
    ),
    AllowedSkip(
        r".*", r"no address of IPv6 but loopback|::1 cannot be had", "IPv6 on this machine"
    ),
    AllowedSkip(
        r"tests/compat/.*",
        r"not for a running deployment",
        "a stand-in: the same test runs where there is one",
    ),
)


class OutcomePlugin:
    """A plugin of pytest that keeps what became of each test of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._outcomes[report.nodeid] = (SKIPPED, _reason(report.longrepr))
        elif report.failed:
            self._outcomes[report.nodeid] = (FAILED, "")
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, (PASSED, ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was read, or could not be."""
        if report.skipped:
            self._outcomes[report.nodeid] = (SKIPPED, _reason(report.longrepr))

    def pytest_sessionfinish(self) -> None:
        """Keep them beside those of other runs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{uuid.uuid4().hex}.json"
        path.write_text(json.dumps(self._outcomes))


def _reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def record_outcomes(config: pytest.Config) -> None:
    """Have a run keep its outcomes, where somebody wants them; xdist's workers tell theirs."""
    folder = os.environ.get(OUTCOMES_ENV)
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomePlugin(Path(folder)), "baton-outcomes")


class Summary(NamedTuple):
    """All runs together."""

    passed: int
    skipped: Mapping[str, str]
    """Tests that ran nowhere, with the last reason."""
    not_allowed: Sequence[str]
    """Those of them that may not be."""


def summarize(runs: Iterable[Mapping[str, Sequence[str]]]) -> Summary:
    """What became of the tests of several runs."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for run in runs:
        for name, (outcome, reason) in run.items():
            if outcome == SKIPPED:
                skipped[name] = reason
            else:
                ran.add(name)
    skipped_everywhere = {name: why for name, why in skipped.items() if name not in ran}
    return Summary(
        len(ran),
        skipped_everywhere,
        [name for name, why in skipped_everywhere.items() if find_allowed_skip(name, why) is None],
    )


def find_allowed_skip(name: str, reason: str) -> AllowedSkip | None:
    """What a skipped test lacks, of what may be lacking."""
    for lack in ALLOWED_SKIPS:
        if re.fullmatch(lack.tests, name) and re.search(lack.reason, reason):
            return lack
    return None


def main(folder: Path) -> int:
    """Say how many tests ran and what did not; 1 where something did not that must."""
    result = summarize(json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    sys.stdout.write(f"{result.passed} tests ran, {len(result.skipped)} were skipped everywhere\n")
    for name, reason in sorted(result.skipped.items()):
        allowed_skip = find_allowed_skip(name, reason)
        note = (
            f"for want of {allowed_skip.missing}" if allowed_skip else f"NOT ON THE LIST: {reason}"
        )
        sys.stdout.write(f"  {name}: {note}\n")
    if not result.passed:
        sys.stdout.write("no run kept anything\n")
    return 1 if result.not_allowed or not result.passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
