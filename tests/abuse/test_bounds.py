"""Bounds of one place that lie within those of the next: what one lets through, the other takes."""

from __future__ import annotations

import pytest

from baton.config import load_config
from baton.domain.value import evolve
from baton.engine.vllm.gate.access import MAX_REQUEST_ID_CHARS
from baton.engine.vllm.gate.limits import MAX_NAME_CHARS, bad_request_id
from baton.engine.vllm.wire.identity import Caller, salt_name, scoped_salt, tenant_session_id
from baton.runtime.link import codec, frames
from baton.serving.ingress.auth import frontend_limits
from tests.fakes.scripted_engine import make_leg

LONGEST_TENANT = "t" * 64


def test_the_longest_name_that_a_client_gives_is_one_that_the_fleet_link_takes() -> None:
    """A frame that a replica refuses ends the session, and with it the streams of everybody."""
    assert bad_request_id("x" * MAX_NAME_CHARS) is None
    assert bad_request_id("x" * (MAX_NAME_CHARS + 1)) is not None
    # A child's index, vLLM's own eight letters, and the number of a resume.
    name = "16383_" + "x" * MAX_NAME_CHARS + "-0123abcd" + "~1000000"
    salt = salt_name(scoped_salt(LONGEST_TENANT, "s" * 1_000_000))
    leg = evolve(make_leg(name), request_id=name, cache_salt=salt)
    assert codec.decode_from_coordinator(codec.encode(frames.Submit(leg))) == frames.Submit(leg)
    assert len("chatcmpl-") + MAX_REQUEST_ID_CHARS < MAX_NAME_CHARS


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "a\x00", "\u202e", "\ud800"])
def test_a_name_is_printable(name: str) -> None:
    assert bad_request_id(name) is not None


def test_what_placement_remembers_of_a_session_is_short() -> None:
    session = tenant_session_id(Caller(LONGEST_TENANT), "s" * 4_000_000)
    assert session is not None
    assert len(session) < 150


def test_by_default_a_request_is_bounded_in_all_that_it_may_ask_for() -> None:
    limits = frontend_limits(load_config(["configs/sim.yaml"]).config)
    assert limits.default_output_tokens is not None
    assert limits.too_many_answers(129) is not None
    assert limits.too_many_answers(128) is None
    assert limits.max_body_bytes <= 4 * 1024 * 1024
    assert limits.max_body_s <= 60
