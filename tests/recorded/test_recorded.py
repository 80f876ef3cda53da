"""The brain orders what it ordered when its behaviour was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from baton.domain.commands import AbortLegs, FailRequest
from baton.domain.errors import RateLimited
from baton.domain.fleet import Role
from baton.policy.scaling.actions import AutoscalerTick
from baton.policy.scaling.observation import ServiceLevel
from tests.recorded import canonical as texts
from tests.recorded.__main__ import FILE, differences, recorded
from tests.recorded.canonical import canonical
from tests.recorded.cases import CASES
from tests.recorded.recorder import Recorder

KNOWN: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text())


def test_every_case_is_recorded() -> None:
    assert KNOWN.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_same_events_give_the_same_commands(name: str) -> None:
    made = json.loads(json.dumps({name: asdict(recorded(name))}))
    assert list(differences(KNOWN, made)) == []


def told(*times_s: float) -> Mapping[str, Any]:
    recorder = Recorder()
    for at_s in times_s:
        recorder.add(recorder, None, at_s, [AbortLegs(replica_id="a", leg_ids=("b",))])
    made: Mapping[str, Any] = json.loads(json.dumps(asdict(recorder.digest())))
    return made


def test_a_difference_is_told_with_where_it_begins() -> None:
    before = [float(number) for number in range(600)]
    other = [*before[:550], 0.0, *before[551:]]
    assert list(differences({"a": told(*before)}, {"a": told(*before)})) == []
    (line,) = differences({"a": told(*before)}, {"a": told(*other)})
    assert "a: 600 calls before, 600 now; alike up to 500" in line
    (line,) = differences({"a": told(*before)}, {"a": told(*before[:-1])})
    assert "AbortLegs 600 -> 599" in line


def test_values_are_compared_by_contents_and_not_by_texts() -> None:
    one = FailRequest(request_id="r", error=RateLimited("r", 1.0, "one reason"))
    other = FailRequest(request_id="r", error=RateLimited("r", 1.0, "another"))
    later = FailRequest(request_id="r", error=RateLimited("r", 2.0, "one reason"))
    assert canonical(one) == canonical(other) != canonical(later)
    assert canonical(AutoscalerTick(at_s=0.0, policy="p", paused_reason="blind")) == canonical(
        AutoscalerTick(at_s=0.0, policy="p")
    )
    assert canonical(ServiceLevel(queued_requests=1)) != canonical(ServiceLevel(queued_requests=2))


def test_renamed_values_are_recorded_by_their_old_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = {
        "AbortLegs": "StopLegs",
        "AbortLegs.leg_ids": "which",
        "Role": "Part",
        "Role.MIXED": "BOTH",
    }
    monkeypatch.setattr(texts, "OLD_NAMES", new)
    aborted = canonical(AbortLegs(replica_id="a", leg_ids=("b",)))
    assert aborted == "StopLegs(replica_id='a', which=['b'])"
    assert canonical(Role.MIXED) == "Part.BOTH"


def test_a_value_without_a_text_is_refused() -> None:
    with pytest.raises(TypeError, match="a object has no canonical text"):
        canonical(object())
