"""Who is let in, what vLLM sees of it, and how the caller and its cache reach the seam."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.vllm.gate.access import Access, Unauthorized, forwarded_headers
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.engine.vllm.wire.identity import (
    CALLER_ARG,
    Caller,
    caller_of,
    scoped_salt,
    tenant_session_id,
    with_caller,
)
from baton.runtime.keys.api_keys import InvalidKey, KeyRing, ValidKey, mint

NOW = datetime(2026, 11, 20, tzinfo=UTC)
ACME, ACME_KEY = mint("acme", now=NOW)
BETA, BETA_KEY = mint("beta", now=NOW)
OLD, OLD_KEY = mint("acme", now=NOW, expires_at=NOW - timedelta(seconds=1))
RING = KeyRing([ACME, BETA, OLD])

Headers = list[tuple[bytes, bytes]]


def look_up(token: str) -> ValidKey | InvalidKey:
    return RING.look_up(token, NOW)


STRICT = Access(look_up=look_up, anonymous=False, isolated=frozenset({"acme"}))
OPEN_TOO = Access(look_up=look_up, anonymous=True)


def bearer(token: str) -> Headers:
    return [(b"authorization", f"Bearer {token}".encode())]


def api_key(token: str) -> Headers:
    return [(b"x-api-key", token.encode())]


@pytest.mark.parametrize("shown", [bearer, api_key])
def test_a_good_key_says_whose_it_is_in_either_header(shown: Callable[[str], Headers]) -> None:
    assert STRICT.identify_caller(shown(ACME_KEY)) == Caller("acme", None, "acme")
    assert STRICT.identify_caller(shown(BETA_KEY)) == Caller("beta", None, None)
    assert STRICT.identify_caller([*bearer(ACME_KEY), *api_key(ACME_KEY)]) == Caller(
        "acme", None, "acme"
    )


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([], "expected an API key"),
        ([(b"authorization", b"Basic dXNlcjpwYXNz")], "expected an API key"),
        ([(b"authorization", b"Bearer")], "expected an API key"),
        ([(b"authorization", b"Bearer ")], "expected an API key"),
        ([(b"authorization", ACME_KEY.encode())], "expected an API key"),
        ([(b"x-api-key", b"")], "expected an API key"),
        (bearer("EMPTY"), "not known"),
        (bearer(ACME_KEY[:-1]), "not known"),
        (bearer(ACME_KEY + " x"), "not known"),
        (bearer(OLD_KEY), "expired"),
        ([*bearer(ACME_KEY), *api_key(BETA_KEY)], "several different"),
        ([*bearer(ACME_KEY), *bearer(BETA_KEY)], "several different"),
        ([*bearer(ACME_KEY), *api_key("wrong")], "several different"),
    ],
)
def test_where_keys_are_needed_no_other_header_is_accepted(headers: Headers, why: str) -> None:
    refused = STRICT.identify_caller(headers)
    assert isinstance(refused, Problem)
    assert refused.status == 401
    assert why in refused.message
    named = dict(refused.headers())
    assert named[b"www-authenticate"].startswith(b'Bearer realm="baton"')
    assert (b"invalid_token" in named[b"www-authenticate"]) == ("expected" not in why)
    for token in (ACME_KEY, BETA_KEY, OLD_KEY):
        assert token.rpartition("_")[2] not in refused.message


def test_requests_without_a_valid_key_are_counted_by_cause_and_others_are_not() -> None:
    counts = Counter[str]()

    def count(cause: Unauthorized) -> None:
        counts[cause] += 1

    access = replace(STRICT, count_unauthorized=count)
    for headers in ([], bearer("x"), bearer(OLD_KEY), [*bearer(ACME_KEY), *api_key(BETA_KEY)]):
        access.identify_caller(headers)
    access.identify_caller(bearer(ACME_KEY))
    assert counts == {"missing": 1, "unknown": 1, "expired": 1, "several": 1}


def test_where_there_are_no_keys_any_word_that_a_client_sends_is_ignored() -> None:
    for headers in ([], bearer("none"), api_key(ACME_KEY)):
        assert Access().identify_caller(headers) == Caller()


def test_without_keys_and_without_anonymous_access_all_are_rejected() -> None:
    refused = Access(anonymous=False).identify_caller(bearer("x"))
    assert isinstance(refused, Problem)
    assert refused.status == 401


def test_beside_callers_without_a_key_a_bad_key_of_ours_is_still_refused() -> None:
    for headers in ([], bearer("none"), api_key("EMPTY")):
        assert OPEN_TOO.identify_caller(headers) == Caller(DEFAULT_TENANT)
    assert OPEN_TOO.identify_caller(bearer(ACME_KEY)) == Caller("acme")
    assert OPEN_TOO.identify_caller([*bearer(ACME_KEY), *api_key("none")]) == Caller("acme")
    for token in (OLD_KEY, ACME_KEY + "x", "bt_"):
        assert isinstance(OPEN_TOO.identify_caller(bearer(token)), Problem)


@pytest.mark.parametrize("value", [b"batch", b"premium-2", b"a.b_C", b"x" * 64])
def test_a_class_is_asked_for_by_its_name(value: bytes) -> None:
    asked = Access().identify_caller([(b"X-SLO-Class", b" " + value + b" ")])
    assert asked == Caller(slo_class=value.decode())


@pytest.mark.parametrize("value", [b"x" * 65, b"a b", b"-a", b"a\x00", b"\xff", b"a,b"])
def test_an_invalid_name_of_a_class_is_a_bad_request(value: bytes) -> None:
    refused = Access().identify_caller([(b"x-slo-class", value)])
    assert isinstance(refused, Problem)
    assert refused.status == 400
    assert "x-slo-class" in refused.message


def test_one_class_is_asked_for_at_most() -> None:
    twice = [(b"x-slo-class", b"a"), (b"x-slo-class", b"a")]
    assert Access().identify_caller(twice) == Caller(slo_class="a")
    assert isinstance(Access().identify_caller([*twice, (b"x-slo-class", b"b")]), Problem)
    assert Access().identify_caller([(b"x-slo-class", b"")]) == Caller()


def test_vllm_sees_no_credentials_and_nothing_that_is_ours_to_say() -> None:
    kept = [
        (b"content-type", b"application/json"),
        (b"x-request-id", b"abc"),
        (b"x-session-id", b"s"),
        (b"x-batonic", b"1"),
    ]
    dropped = [
        (b"Authorization", b"Bearer x"),
        (b"proxy-authorization", b"x"),
        (b"X-Api-Key", b"x"),
        (b"cookie", b"x"),
        (b"Traceparent", b"00-1"),
        (b"tracestate", b"a=1"),
        (b"x-slo-class", b"x"),
        (b"X-Baton-Tenant", b"x"),
        (b"x-baton-", b"x"),
        (b"x-request-disconnect-disabled", b"x"),
        (b"x-request-timeout-seconds", b"1"),
        (b"X-Vllm-Priority", b"-9"),
        (b"X-data-parallel-rank", b"7"),
    ]
    assert forwarded_headers([*dropped, *kept]) == kept


@pytest.mark.parametrize("value", [b"a", b"x" * 128, b"6f1c-9.A_b:c/d=e@f+g"])
def test_a_client_may_name_its_request(value: bytes) -> None:
    assert forwarded_headers([(b"X-Request-Id", value)]) == [(b"X-Request-Id", value)]


@pytest.mark.parametrize(
    "values",
    [[b""], [b"x" * 129], [b"a b"], [b"a\tb"], [b"\xff"], [b"a", b"a"], [b'a"b'], [b"%0a"]],
)
def test_a_request_id_is_one_short_word(values: list[bytes]) -> None:
    assert forwarded_headers([(b"x-request-id", value) for value in values]) == []


def test_a_session_is_its_tenant_s_own_and_short() -> None:
    acme, beta = Caller("acme"), Caller("beta")
    assert tenant_session_id(acme, None) is tenant_session_id(acme, "") is None
    assert tenant_session_id(acme, "s") == "acme/s"
    assert tenant_session_id(acme, "s") != tenant_session_id(beta, "s")
    long = tenant_session_id(acme, "s" * 4_000_000)
    assert long is not None
    assert len(long) < 100
    assert long != tenant_session_id(acme, "s" * 3_999_999)
    assert tenant_session_id(acme, "s" * 128) == "acme/" + "s" * 128


@pytest.mark.parametrize("status", [400, 401, 403, 408, 429, 431, 503, 504])
def test_every_refusal_has_a_word_of_its_own_in_every_dialect(status: int) -> None:
    problem = Problem(status=status, message="m")
    for dialect in Dialect:
        error = json.loads(problem.body(dialect))["error"]
        assert error["type"] not in {"api_error", "InternalServerError"}
    retry_after = dict(problem.headers()).get(b"retry-after")
    assert retry_after == (b"1" if status in {429, 503} else None)


texts = st.text(max_size=6) | st.sampled_from(["baton:", "baton:tenant:a", "baton:shared:"])
scopes = st.none() | st.sampled_from(["a", "b", "a.b", "shared", "tenant"])


@settings(max_examples=60)
@example(one=("a", None), other=(None, "baton:tenant:a"))
@example(one=("a", "x"), other=(None, "baton:tenant:a:x"))
@example(one=("a", None), other=("a", ""))
@example(one=(None, None), other=(None, ""))
@example(one=(None, "baton:x"), other=(None, "baton:shared:baton:x"))
@given(one=st.tuples(scopes, st.none() | texts), other=st.tuples(scopes, st.none() | texts))
def test_no_caller_can_write_the_salt_of_another_scope(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    assert (scoped_salt(*one) == scoped_salt(*other)) == (one == other)


def test_without_tenants_of_their_own_salts_are_as_clients_sent_them() -> None:
    assert scoped_salt(None, None) is None
    assert scoped_salt(None, "mine") == "mine"


@given(
    caller=st.builds(
        Caller,
        tenant=st.text(max_size=5),
        slo_class=st.none() | st.text(max_size=5),
        cache_scope=st.none() | st.text(max_size=5),
    ),
    forged=st.none() | st.lists(st.none() | st.text(max_size=5) | st.integers(), max_size=4),
)
@settings(max_examples=60)
def test_the_caller_is_the_gates_and_never_the_clients_own_words(
    caller: Caller, forged: object
) -> None:
    sent = {"own": 1, CALLER_ARG: forged}
    carried = with_caller(sent, caller)
    assert carried is not None
    assert carried["own"] == 1
    assert caller_of(carried) == caller
    assert caller_of({CALLER_ARG: forged}) == (
        Caller(*forged)
        if isinstance(forged, list)
        and len(forged) == 3
        and isinstance(forged[0], str)
        and all(part is None or isinstance(part, str) for part in forged[1:])
        else Caller()
    )


def test_the_default_caller_adds_no_arguments() -> None:
    assert with_caller(None, Caller()) is None
    assert with_caller({CALLER_ARG: ["acme", None, None]}, Caller()) is None


def test_only_the_key_decides_about_administration() -> None:
    ops = ValidKey(key_id="k1", tenant="ops", is_admin=True)
    known = {"bt_ops": ops, "bt_user": ValidKey(key_id="k2", tenant="acme")}
    access = Access(look_up=lambda token: known.get(token, InvalidKey()), anonymous=True)
    assert access.identify_administrator([(b"x-api-key", b"bt_ops")]) == ops
    for headers, status in (
        ([], 401),
        ([(b"x-api-key", b"bt_user")], 403),
        ([(b"x-api-key", b"none")], 401),
        ([(b"x-api-key", b"bt_user"), (b"authorization", b"Bearer bt_ops")], 401),
    ):
        refused = access.identify_administrator(headers)
        assert isinstance(refused, Problem)
        assert refused.status == status
    nobody = Access(anonymous=True).identify_administrator([(b"x-api-key", b"bt_ops")])
    assert isinstance(nobody, Problem)
    assert nobody.status == 403
