"""The error tree: complete, drawn, and able to cross processes."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator

import pytest

from baton.domain import errors
from baton.domain.errors import BatonError, OperatorError, Rejected

ARGUMENTS: dict[str, object] = {
    "request_id": "r-1",
    "replica_id": "d-1",
    "component": "controller",
    "leg_id": "r-1.0",
    "retry_after_s": 2.0,
    "why": "it broke",
    "remedy": "mend it",
    "problems": ("one", "two"),
    "name": "conv.csv",
    "line": 7,
    "problem": "no such column",
    "term": "weights",
    "excess_bytes": 2e9,
    "min_parallelism": (4, 1),
}


def tree(root: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            if not child.__name__.startswith("_"):
                yield child
            yield from tree(child)


KINDS = sorted(tree(), key=str)


def an(kind: type[BatonError]) -> BatonError:
    names = inspect.signature(kind).parameters
    return kind(*(ARGUMENTS[name] for name in names))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_processes_with_all_that_it_says(kind: type[BatonError]) -> None:
    sent = an(kind)
    received = pickle.loads(pickle.dumps(sent))  # noqa: S301 - our own bytes; Ray does the same
    assert type(received) is kind
    assert (str(received), vars(received)) == (str(sent), vars(sent))
    assert str(sent)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_in_the_drawing(kind: type[BatonError]) -> None:
    assert f"─ {kind.__name__} " in (errors.__doc__ or "")


def test_whoever_is_refused_is_told_when_to_come_back() -> None:
    for kind in tree(Rejected):
        error = an(kind)
        assert isinstance(error, Rejected)
        assert error.retry_after_s > 0
        assert error.http_status in {429, 503}


def test_whoever_runs_baton_is_told_what_to_do() -> None:
    assert {kind.__name__ for kind in tree(OperatorError)} >= {"EngineStartFailed", "TimedOut"}
    for kind in tree(OperatorError):
        assert "mend it" in str(an(kind))
