"""A caller's trace goes through vLLM's handlers to whoever serves the request."""

from __future__ import annotations

import httpx
import pytest

from baton.domain.names.trace_context import TraceContext, span_id
from baton.domain.request import Request
from baton.engine.vllm.gate.access import Access
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import Server, ServerThread
from tests.compat.test_compat_failures import PATHS

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("require_echo_server"),
]

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "v=1"}


def asked(server: Server, fleet: EchoFleet, path: str, **more: object) -> list[Request]:
    """The requests that one of a client's becomes."""
    headers = more.pop("headers", HEADERS)
    body = {"model": server.model, **PATHS[path], **more}
    body |= {"max_output_tokens": 2} if "max_output_tokens" in body else {"max_tokens": 2}
    answer = httpx.post(server.base_url + path, json=body, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    found = [fleet.arrived.get(timeout=5)]
    while not fleet.arrived.empty():
        found.append(fleet.arrived.get(timeout=5))
    return found


@pytest.mark.parametrize("path", list(PATHS))
def test_every_kind_of_request_belongs_to_its_callers_trace(
    server: Server, fleet: EchoFleet, path: str
) -> None:
    (request,) = asked(server, fleet, path)
    operation = "text_completion" if path == "/v1/completions" else "chat"
    assert request.trace == TraceContext(
        TRACE_ID, PARENT_ID, sampled=True, state="v=1", operation=operation
    )
    own = span_id(TRACE_ID, request.request_id)
    assert f"00-{TRACE_ID}-{own}-01".encode() in request.payload, "what its engine is told"
    assert b"baton_trace" not in request.payload


def test_all_answers_of_a_request_are_in_its_trace(server: Server, fleet: EchoFleet) -> None:
    requests = asked(server, fleet, "/v1/completions", n=3, seed=5)
    assert len(requests) == 3
    assert {request.trace and request.trace.trace_id for request in requests} == {TRACE_ID}


def test_without_a_caller_that_traces_there_is_no_trace_unless_they_begin_here(
    server: Server, fleet: EchoFleet, echo_server: tuple[ServerThread, EchoFleet]
) -> None:
    forged = {"baton_trace": [TRACE_ID, PARENT_ID, True, "", "chat"]}
    (request,) = asked(server, fleet, "/v1/completions", headers={}, vllm_xargs=forged)
    assert request.trace is None
    thread, _ = echo_server
    thread.reconfigure(access=Access(trace_sample_fraction=0.0))
    try:
        (request,) = asked(server, fleet, "/v1/completions", headers={}, vllm_xargs=forged)
    finally:
        thread.reconfigure(access=Access())
    assert request.trace is not None
    assert request.trace.trace_id != TRACE_ID
    assert b"traceparent" not in request.payload
