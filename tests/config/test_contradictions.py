"""Keys that are valid each by itself, and work against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.config.checks.contradictions import contradictions
from baton.config.derive.options import coordinator_limits, scales_from_zero, split_by_model
from tests.config.conftest import Load, Refuse

ZERO = """
version: 1
model: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
pools:
  prefill: {role: prefill, replicas: {min: 0, initial: 1}}
  decode: {role: decode, replicas: {min: 0, initial: 1}}
"""
SCALES = "autoscaler: {scale_to_zero: true}\n"


def test_where_keys_agree_nothing_is_said(load: Load) -> None:
    assert not contradictions(load(ZERO).config)
    assert not contradictions(load(ZERO + SCALES).config)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "autoscaler: {scale_to_zero: true, policy: static}",
            "autoscaler.scale_to_zero: no effect with autoscaler.policy: static",
        ),
        (
            "autoscaler: {scale_to_zero: true, dry_run: true}",
            "autoscaler.scale_to_zero: no effect with autoscaler.dry_run: true",
        ),
        (
            SCALES + "admission: {timeouts: {total: 60s}}",
            "admission.timeouts.total: got 60s, expected more than admission.cold_start_timeout",
        ),
        (
            SCALES + "admission: {cold_start_timeout: 10s, queue_timeout: 20s}",
            "admission.cold_start_timeout: got 10s, expected at least admission.queue_timeout",
        ),
        (
            SCALES + "admission: {cold_start_timeout: 3s}",
            "admission.cold_start_timeout: got 3s, expected at least two of autoscaler.interval",
        ),
    ],
)
def test_contradicting_keys_are_reported(load: Load, text: str, key: str) -> None:
    (found,) = contradictions(load(ZERO + text).config)
    assert found.startswith(key)
    assert ";" in found, "it says what to do"


def test_requests_wait_for_a_cold_start_where_the_fleet_can_be_at_zero(load: Load) -> None:
    assert coordinator_limits(load(ZERO).config).cold_start_timeout_s is None
    assert coordinator_limits(load(ZERO + SCALES).config).cold_start_timeout_s == 300.0
    some = ZERO.replace("{min: 0, initial: 1}", "{min: 1, initial: 1}", 1)
    assert coordinator_limits(load(some + SCALES).config).cold_start_timeout_s is None
    assert (
        coordinator_limits(
            load(ZERO + SCALES[:-2] + ", dry_run: true}").config
        ).cold_start_timeout_s
        is None
    )


def test_of_several_models_only_those_can_be_at_zero_all_of_whose_pools_can(load: Load) -> None:
    config = load(
        """
version: 1
models:
  a: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
  b: {source: tiny, max_len: 4096, engine: {kind: sim, sim: {}}}
pools:
  for-a: {model: a, role: mixed, replicas: {min: 0, initial: 1}}
  for-b: {model: b, role: mixed}
"""
        + SCALES
    ).config
    assert {name: scales_from_zero(part) for name, part in split_by_model(config).items()} == {
        "a": True,
        "b": False,
    }


# -------------------------------------------------------------------- refused configurations


FILE = Path(__file__).with_name("refused.txt")
ANCHORS = {
    "pool": "role: mixed",
    "decode": "role: decode",
    "model": "max_len: 4096",
    "engine": "kind: sim",
}
"""Where a part of a configuration says more: behind this."""


@dataclass
class Case:
    """A configuration, changed by some edits, with its findings."""

    base: str
    edits: list[str] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        text = self.base
        for edit in self.edits:
            verb, _, words = edit.partition(":")
            text = edited(text, verb, words.strip().replace("\\n", "\n"))
        return text


def edited(text: str, verb: str, words: str) -> str:
    if verb == "whole":
        return words
    if verb == "added":
        return f"{text}{words}\n"
    if verb == "instead":
        old, new = words.split(" => ")
    else:
        old = ANCHORS[verb]
        new = f"{old}, {words}"
    assert text.count(old) == 1, f"not one place to edit: {old}"
    return text.replace(old, new)


def read_cases() -> list[Case]:
    base, cases = "", [Case("")]
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            base = ""
        elif line.startswith("> "):
            base += line.removeprefix("> ") + "\n"
        elif line.startswith("    "):
            token, _, says = line.removeprefix("    ").partition(" | ")
            cases[-1].findings.append((token, says))
        elif line and not line.startswith("#"):
            if not cases[-1].edits or cases[-1].findings:
                cases.append(Case(base))
            cases[-1].edits.append(line)
    return cases[1:]


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: "; ".join(case.edits))
def test_impossible_values_are_refused_with_their_places_all_together(
    load_invalid: Refuse, case: Case
) -> None:
    text = case.text()
    lines = [*text.splitlines(), ""]
    found = load_invalid(text)
    assert len(found) == len(case.findings), found
    for finding, (token, says) in zip(found, case.findings, strict=True):
        _file, line, column, words = finding.split(":", 3)
        at_place = lines[int(line) - 1][int(column) - 1 :]
        begins = (at_place[: len(token)], words.strip()[: len(says)])
        assert begins == (token, says)
