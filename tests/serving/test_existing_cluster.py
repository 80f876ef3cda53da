"""Which cluster a deployment goes to, and what is refused before anybody is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.domain.errors import ClusterFailed, NotRunning, PreflightFailed
from baton.serving.application.app import ingress_options
from baton.serving.operator.attached import attach_deployment, find_local_state
from baton.serving.operator.existing_cluster import (
    cluster_address,
    deploy_to_cluster,
    with_live_cluster,
)
from tests.serving.configs import simulated


@pytest.mark.parametrize(
    ("said", "environ", "named"),
    [
        ("", {}, None),
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.1:6379"),
        ("cluster.address=10.0.0.2:6379", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.2:6379"),
        ("cluster.address=auto", {}, "auto"),
        ("", {"RAY_ADDRESS": "local"}, None),
        ("", {"RAY_ADDRESS": ""}, None),
    ],
)
def test_the_file_says_where_to_deploy_and_else_the_environment(
    said: str, environ: dict[str, str], named: str | None
) -> None:
    assert cluster_address(simulated(*([said] if said else [])), environ) == named


def test_an_address_that_is_none_is_refused_with_the_file() -> None:
    with pytest.raises(Exception, match=r"cluster\.address: got 'x', expected HOST:PORT"):
        simulated("cluster.address=x")


def test_a_configuration_is_applied_to_where_it_runs_whatever_it_says_of_that() -> None:
    live = simulated("cluster.address=10.0.0.2:6379", "cluster.allow_open=true")
    wanted = with_live_cluster(simulated("slo.default.ttft=3s"), live)
    assert wanted.cluster == live.cluster
    assert wanted.slo != live.slo


def test_what_only_a_cluster_of_batons_own_can_do_is_said_before_it_is_joined() -> None:
    gate = ("server.api_server=rust", "server.listener=ingress")
    wanted = simulated("security.tls={cert_file: a.pem, key_file: b.pem}", *gate)
    with pytest.raises(PreflightFailed, match=r"speaks no TLS") as raised:
        deploy_to_cluster(wanted, "127.0.0.1:1", timeout_s=1.0, progress=print)
    assert "nobody starts on a cluster that runs already" in str(raised.value)


def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(ClusterFailed, match=r"nothing answers at 127\.0\.0\.1:1"):
        deploy_to_cluster(simulated(), "127.0.0.1:1", timeout_s=1.0, progress=print)


def test_ingresses_are_where_the_front_of_the_head_reaches_them() -> None:
    at = "cluster.address=10.0.0.2:6379"
    hidden = ingress_options(simulated(at))["ray_actor_options"]
    assert hidden == {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    shown = ingress_options(simulated(at, "server.host=0.0.0.0"))["ray_actor_options"]
    assert shown == {"num_cpus": 0.01}
    assert ingress_options(simulated())["ray_actor_options"] == {"num_cpus": 0.01}


def test_verbs_go_to_the_cluster_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(NotRunning, match="no deployment of this user runs"):
        find_local_state(None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert find_local_state(None) is None
    with (
        pytest.raises(ClusterFailed, match=r"nothing answers at 127\.0\.0\.1:1"),
        attach_deployment(None),
    ):
        raise AssertionError("it was joined")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265"])
def test_the_address_of_something_else_of_rays_is_told_from_the_one_that_is_meant(
    address: str,
) -> None:
    with pytest.raises(ClusterFailed, match=r"expected HOST:PORT of its head's store"):
        deploy_to_cluster(simulated(), address, timeout_s=1.0, progress=print)
