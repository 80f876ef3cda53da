"""Who asks, as the gate before vLLM's Rust frontend says it in a request's id."""

from __future__ import annotations

import itertools
import warnings

import pytest

from baton.engine.vllm.gate.limits import MAX_BAD_WORDS, FrontendLimits
from baton.engine.vllm.wire.identity import CALLER_ARG, Caller
from tests.fakes.frontends import engine_request

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    from baton.engine.vllm.frontend.rust_requests import RustCallers
    from baton.engine.vllm.wire.codec import FrontendCodec, UnsupportedRequest


def callers(**limits: int) -> RustCallers:
    counted = itertools.count()
    return RustCallers(
        limits=FrontendLimits(**limits),  # type: ignore[arg-type]  # tests know the names
        max_len_tokens=512,
        isolated={"secret"},
        new_handle=lambda: f"h{next(counted)}",
    )


def request(external_id: str | None, **changes: object) -> EngineCoreRequest:
    return engine_request(f"{external_id}-0123abcd", external_req_id=external_id, **changes)


def test_a_tenant_keeps_its_handle_and_two_tenants_have_two() -> None:
    door = callers()
    assert door.tenant_handle("acme") == door.tenant_handle("acme") != door.tenant_handle("other")


def test_handles_say_nothing_of_a_tenant_and_cannot_be_guessed() -> None:
    door = RustCallers(limits=FrontendLimits(), max_len_tokens=512)
    first, second = (
        door.tenant_handle("acme"),
        RustCallers(limits=FrontendLimits(), max_len_tokens=512).tenant_handle("acme"),
    )
    assert first != second
    assert len(first) == 18
    assert "acme" not in first


@pytest.mark.parametrize(
    ("said", "slo_class"), [("name~h0~gold", "gold"), ("h0~h1~gold~h0~", None), ("~h0~", None)]
)
def test_tenant_and_class_are_the_last_two_words_of_the_id(said: str, slo_class: str) -> None:
    door = callers()
    door.tenant_handle("acme")
    door.tenant_handle("other")
    assert door.identify(request(f"chatcmpl-{said}")) == (Caller("acme", slo_class), None)


@pytest.mark.parametrize(
    ("said", "slo_class", "session_id"),
    [
        ("name~h0~gold+0123456789abcdef", "gold", "acme/0123456789abcdef"),
        ("name~h0~+ab", None, "acme/ab"),
        ("a+b~h0~gold", "gold", None),
        ("name~h0~+", None, None),
    ],
)
def test_a_session_is_behind_the_class_and_its_tenants_own(
    said: str, slo_class: str | None, session_id: str | None
) -> None:
    door = callers()
    door.tenant_handle("acme")
    asked = request(f"chatcmpl-{said}")
    assert door.identify(asked) == (Caller("acme", slo_class), None)
    assert asked.session_id == session_id


def test_a_tenant_with_a_cache_of_its_own_has_its_scope() -> None:
    door = callers()
    door.tenant_handle("secret")
    caller, _ = door.identify(request("cmpl-a~h0~"))
    assert caller == Caller("secret", None, "secret")


@pytest.mark.parametrize("said", [None, "", "cmpl-a", "cmpl-a~h9~", "cmpl-a~h0", "cmpl-h0~x"])
def test_a_request_that_did_not_come_through_the_gate_is_not_run(said: str | None) -> None:
    door = callers()
    door.tenant_handle("acme")
    with pytest.raises(UnsupportedRequest, match="did not come through the gate"):
        door.identify(request(said))


def test_a_clients_forbidden_fields_are_removed_or_replaced() -> None:
    door = callers()
    door.tenant_handle("acme")
    params = SamplingParams(max_tokens=9, extra_args={CALLER_ARG: ["other", None, None], "b": 2})
    asked = request("cmpl-a~h0~", priority=-9, session_id="s", sampling_params=params)
    wire = FrontendCodec(max_len_tokens=512, identify=door.identify)
    taken = wire.decode_request(
        wire.decode_engine_request(MsgpackEncoder().encode(asked)), now_s=0.0
    )
    assert (taken.tenant, taken.priority, taken.session_id) == ("acme", 0, "acme/s")
    assert b"other" not in taken.payload


def test_more_tokens_than_allowed_are_cut() -> None:
    door = callers(max_tokens=4)
    door.tenant_handle("acme")
    asked = request("cmpl-a~h0~", sampling_params=SamplingParams(max_tokens=9, min_tokens=8))
    door.identify(asked)
    assert (asked.sampling_params.max_tokens, asked.sampling_params.min_tokens) == (4, 4)


@pytest.mark.parametrize(("asked", "given"), [(508, 508), (509, 7), (600, 7), (8, 8)])
def test_asking_for_all_remaining_tokens_equals_asking_for_none(asked: int, given: int) -> None:
    door = callers(default_max_tokens=7)
    door.tenant_handle("acme")
    request_ = request("cmpl-a~h0~", sampling_params=SamplingParams(max_tokens=asked))
    door.identify(request_)
    assert request_.sampling_params.max_tokens == given


def test_too_many_bad_words_are_refused() -> None:
    door = callers()
    door.tenant_handle("acme")
    params = SamplingParams(max_tokens=9)
    params._bad_words_token_ids = [[1]] * (MAX_BAD_WORDS + 1)
    with pytest.raises(UnsupportedRequest, match="bad words"):
        door.identify(request("cmpl-a~h0~", sampling_params=params))
