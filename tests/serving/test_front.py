"""HAProxy's own word for whether it has found the ingress."""

from __future__ import annotations

import pytest

from baton.serving.checks.facts import http_problem
from baton.serving.cluster.readiness import local_client
from baton.serving.front.haproxy_admin import direct_server_is_up
from tests.fakes.hub import serve_hub

STAT_HEADER = "# pxname,svname,scur,status,weight,act,bck,\n"


@pytest.mark.parametrize(
    ("rows", "is_up"),
    [
        ("app,one,0,UP,1,1,0,\napp,proxy,0,UP,1,0,1,\napp,BACKEND,0,UP,1,1,1,\n", True),
        ("app,one,0,DOWN,1,1,0,\napp,proxy,0,UP,1,0,1,\napp,BACKEND,0,UP,1,1,1,\n", False),
        ("http,FRONTEND,0,OPEN,,,,\napp,proxy,0,UP,1,0,1,\n", False),
    ],
    ids=["checked", "not checked yet", "not known yet"],
)
def test_the_direct_path_is_there_when_a_server_that_is_no_backup_is_up(
    rows: str,
    is_up: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    assert direct_server_is_up(STAT_HEADER + rows) is is_up


def test_no_answer_of_haproxy_is_no_direct_path() -> None:
    assert not direct_server_is_up("")


def test_what_is_on_this_machine_is_asked_without_the_shells_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serve_hub({}) as server, local_client(server.url) as client:
        assert client.get("/health").status_code == 404
        assert http_problem(server.url) == ""
