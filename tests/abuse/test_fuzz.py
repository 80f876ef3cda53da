"""That the fuzzers find what there is to find; and seconds of what they do for minutes."""

from __future__ import annotations

from random import Random

import pytest

from tests.abuse import targets
from tests.abuse.fuzz import Target, fuzz, mutate


def test_whatever_a_judge_raises_is_kept_with_what_makes_it_again() -> None:
    def judge(number: int) -> str:
        if number == 3:
            raise KeyError("three")
        return "even" if number % 2 == 0 else "odd"

    target = Target(make=lambda rng: rng.randrange(5), check=judge)
    found = fuzz(target, seconds=5, seed=1, inputs=200)
    assert found.inputs == 200
    assert found.failures == 200 - sum(found.outcomes.values()) > 10
    assert set(found.outcomes) == {"even", "odd"}
    number = int(found.first_failures[0].split()[1])
    assert target.make(Random(f"1 {number}")) == 3
    assert "KeyError: 'three'" in found.first_failures[0]


def test_what_hangs_is_ended() -> None:
    def judge(_made: int) -> str:
        while True:
            pass

    target = Target(make=lambda _rng: 1, check=judge, timeout_s=0.02)
    found = fuzz(target, seconds=5, seed=1, inputs=1)
    assert found.failures == 1
    assert "Hangs" in found.first_failures[0]


def test_mutations_are_the_same_for_a_seed_and_mostly_change_something() -> None:
    data = bytes(range(100))
    made = [mutate(data, Random(seed)) for seed in range(50)]
    assert made == [mutate(data, Random(seed)) for seed in range(50)]
    assert sum(other != data for other in made) > 40


def test_a_codec_that_lets_anything_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.link(10)
    assert fuzz(target, seconds=0.3, seed=2).failures == 0

    def broken(parts: object) -> object:
        raise ValueError("not one of ours")

    monkeypatch.setattr("tests.abuse.targets._DECODERS", (broken,))
    assert fuzz(target, seconds=5, seed=2, inputs=10).failures == 10


def test_a_reader_of_events_that_minds_where_they_are_cut_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = targets.sse()
    assert fuzz(target, seconds=0.2, seed=2).failures == 0
    monkeypatch.setattr("tests.abuse.targets._read", lambda pieces: [len(pieces)])
    assert fuzz(target, seconds=5, seed=2, inputs=10).failures > 5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["link", "config", "sse"])
def test_for_seconds_nothing_is_found(name: str) -> None:
    found = fuzz(getattr(targets, name)(), seconds=5, seed=3)
    assert found.first_failures == []
    assert len(found.outcomes) >= 2
