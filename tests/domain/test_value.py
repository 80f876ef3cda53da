from __future__ import annotations

import gc
import inspect
import pickle
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, signature
from weakref import ref

import pytest

from baton.domain import errors
from baton.domain.commands import FailRequest
from baton.domain.errors import BatonError, OperatorError, Rejected
from baton.domain.handoff import KvHandle, Leg, LegKind
from baton.domain.value import Value, evolve

WHERE = (
    *("domain.commands", "domain.events", "domain.fleet", "domain.request"),
    *("policy.admission.slo_evaluation", "policy.placement.port"),
    *("policy.placement.candidates", "control.fleet.leg_table"),
    *("simulator.engine.commands", "simulator.v1.core"),
)
IN_ORDER = {
    *("Delivery", "FinishedSteps", "PlacementOption", "QueueCounts", "ReplicationCredit"),
    *("RouteOption", "Served", "StepBatch"),
}
"""Those that are made with their fields in order, too."""
TICKET = KvHandle(tokens=32, blocks=2, params=b"ticket")
LEG = Leg(
    leg_id="a#1",
    request_id="a",
    kind=LegKind.DECODE,
    prompt_token_ids=(1, 2),
    max_tokens=3,
    kv_handle=TICKET,
)


def kinds(of: type[Value] = Value) -> Iterator[type[Value]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_value_is_frozen_and_made_with_names() -> None:
    for module in WHERE:
        import_module(f"baton.{module}")
    found = set(kinds())
    assert {"ReplicaView", "RequestArrived", "DispatchedLeg"} <= {kind.__name__ for kind in found}
    for kind in found:
        in_order = kind.__name__ in IN_ORDER
        named = Parameter.POSITIONAL_OR_KEYWORD if in_order else Parameter.KEYWORD_ONLY
        assert kind.__struct_config__.frozen, kind
        assert {parameter.kind for parameter in signature(kind).parameters.values()} <= {named}, (
            kind
        )


def test_a_value_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        LEG.max_tokens = 4  # type: ignore[misc]  # what must not be


def test_values_are_equal_and_hashed_by_their_contents() -> None:
    same, other = evolve(LEG), evolve(LEG, max_tokens=4)
    assert (same is LEG, same == LEG, hash(same) == hash(LEG)) == (False, True, True)
    assert other != LEG
    assert {LEG, same, other} == {LEG, other}


def test_a_value_reads_as_it_is_made() -> None:
    assert repr(TICKET) == "KvHandle(tokens=32, blocks=2, params=b'ticket')"


def test_an_evolved_value_is_checked_like_a_new_one() -> None:
    with pytest.raises(ValueError, match="carries a KV handle"):
        evolve(LEG, kv_handle=None)


def test_there_is_no_evolving_what_a_value_does_not_have() -> None:
    with pytest.raises(TypeError):
        evolve(TICKET, pages=3)  # type: ignore[call-arg]  # what must not be


def test_a_value_survives_its_way_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(LEG)) == LEG  # noqa: S301 - its own


def test_a_failure_that_leads_back_to_its_command_is_collected() -> None:
    error = BatonError("a")
    error.command = FailRequest(request_id="a", error=error)  # type: ignore[attr-defined]  # a cycle
    gone = ref(error)
    del error
    gc.collect()
    assert gone() is None


# ---------- the error tree: complete, drawn, and able to cross processes
ARGUMENTS: dict[str, object] = {
    "request_id": "r-1",
    "replica_id": "d-1",
    "component": "controller",
    "leg_id": "r-1.0",
    "retry_after_s": 2.0,
    "reason": "it broke",
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


def test_every_rejection_has_a_retry_time() -> None:
    for kind in tree(Rejected):
        error = an(kind)
        assert isinstance(error, Rejected)
        assert error.retry_after_s > 0
        assert error.http_status in {429, 503}


def test_every_error_has_a_remedy_for_the_operator() -> None:
    assert {kind.__name__ for kind in tree(OperatorError)} >= {"EngineStartFailed", "TimedOut"}
    for kind in tree(OperatorError):
        assert "mend it" in str(an(kind))
