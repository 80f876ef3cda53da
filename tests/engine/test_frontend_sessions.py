"""The session of a request, however a client says it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.vllm.wire.identity import (
    MAX_SESSION_CHARS,
    SESSION_HEADERS,
    Caller,
    session_in_body,
    session_in_headers,
    tenant_session_id,
)

ACME, BETA = Caller("acme"), Caller("beta")


@pytest.mark.parametrize(
    "name", [b"X-Session-ID", b"X-Claude-Code-Session-Id", b"x-session-affinity", b"Session_Id"]
)
def test_a_header_that_agents_send_names_the_session(name: bytes) -> None:
    assert session_in_headers([(b"accept", b"*/*"), (name, b" 6f1c-9 ")]) == "6f1c-9"


def test_the_first_header_of_the_list_counts_and_of_two_the_one_that_came_first() -> None:
    said = [(name, b"of-" + name) for name in reversed(SESSION_HEADERS)]
    assert session_in_headers(said) == "of-x-session-id"
    assert session_in_headers([(b"session_id", b"a"), (b"session_id", b"b")]) == "a"


@pytest.mark.parametrize("value", [b"", b"  ", b"a\x00b", b"a\tb", b"\x1b[31m", b"a\x85b"])
def test_a_header_that_is_no_name_is_passed_over(value: bytes) -> None:
    assert session_in_headers([(b"x-claude-code-session-id", value)]) is None
    said = [(b"x-claude-code-session-id", value), (b"session_id", b"s")]
    assert session_in_headers(said) == "s"


def test_openais_key_of_a_prompts_cache_names_the_session() -> None:
    body = json.dumps({"messages": [], "prompt_cache_key": "conv-1"}).encode()
    assert session_in_body(body) == "conv-1"
    inside = {"messages": [{"prompt_cache_key": "no"}], "x": '"prompt_cache_key": "no"'}
    assert session_in_body(json.dumps(inside).encode()) is None


@pytest.mark.parametrize("key", [None, 5, True, [], {}, "", "a\nb", "\x1b[31m"])
def test_a_key_that_is_no_name_is_passed_over(key: object) -> None:
    assert session_in_body(json.dumps({"prompt_cache_key": key}).encode()) is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt_cache_key": ', b'["prompt_cache_key"]', b'"prompt_cache_key"']
)
def test_an_unreadable_body_names_no_session(body: bytes) -> None:
    assert session_in_body(body) is None


@given(st.binary(max_size=80), st.lists(st.tuples(st.sampled_from(SESSION_HEADERS), st.binary())))
def test_every_session_header_is_a_name_or_ignored(
    body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    for found in (
        session_in_body(b'{"prompt_cache_key": "' + body + b'"}'),
        session_in_headers(headers),
    ):
        assert found is None or (found and found.isprintable())


@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_no_sessions_of_two_tenants_are_the_same_and_none_is_long(one: str, other: str) -> None:
    mine, theirs = tenant_session_id(ACME, one), tenant_session_id(BETA, other)
    assert mine is None or mine != theirs
    assert len(mine or "") <= len("acme/") + MAX_SESSION_CHARS


def test_a_long_name_is_kept_as_its_digest_and_no_two_are_the_same() -> None:
    longest = "x" * MAX_SESSION_CHARS
    assert tenant_session_id(ACME, longest) == f"acme/{longest}"
    digests = {tenant_session_id(ACME, longest + more) for more in ("a", "b", "c" * 10**6)}
    assert len(digests) == 3
    assert all(len(digest or "") <= len("acme/") + MAX_SESSION_CHARS for digest in digests)


def test_the_first_name_that_is_one_counts() -> None:
    assert tenant_session_id(ACME, None, "", "a\nb", "s", "t") == "acme/s"
    assert tenant_session_id(ACME, None, "") is None
