"""What pods cannot give is refused before anything is written, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.manifests.export import Target
from baton.manifests.settings import CannotExport
from tests.deploy.test_rendered import config, export_of

PODS = (Target.KUBERAY, Target.HELM, Target.KUSTOMIZE)


@pytest.mark.parametrize("target", PODS)
@pytest.mark.parametrize(
    ("more", "by"),
    [
        ("server: {port: 8080}", "server.port is 8080, on which Ray's metrics"),
        ("server: {port: 21100}", "server.port is 21100, on which Ray Serve's front"),
        ("server: {port: 52365}", "server.port is 52365, on which Ray's agent"),
        (
            "observability: {metrics: {port: 8265}}",
            "observability.metrics.port is 8265, on which Ray's dashboard",
        ),
    ],
)
def test_a_port_on_which_another_listens_in_the_pod_is_refused(
    tmp_path: Path, target: Target, more: str, by: str
) -> None:
    with pytest.raises(CannotExport, match=by):
        export_of(config(tmp_path, more), target)


def test_the_port_of_metrics_that_nobody_serves_is_in_nobodys_way(tmp_path: Path) -> None:
    seen = "metrics: {enabled: false, port: 8265}, console: {enabled: false}"
    assert export_of(config(tmp_path, f"observability: {{{seen}}}"))


@pytest.mark.parametrize("target", [Target.RAY, Target.SYSTEMD])
def test_a_port_that_only_pods_need_is_free_elsewhere(tmp_path: Path, target: Target) -> None:
    resources = "pools.decode.resources.accelerator=H100"
    assert export_of(config(tmp_path, "server: {port: 8080}"), target, sets=[resources])


@pytest.mark.parametrize("target", PODS)
@pytest.mark.parametrize("path", ["pools.decode.env", "transfer.env"])
def test_a_variable_that_is_read_from_a_file_is_refused(
    tmp_path: Path, target: Target, path: str
) -> None:
    said = f"{path}.TOKEN={{file: /srv/secret}}"
    with pytest.raises(CannotExport, match=rf"{path}\.TOKEN is read from the file /srv/secret"):
        export_of(config(tmp_path), target, sets=[said])


def test_a_variable_that_is_read_from_another_variable_is_kept(tmp_path: Path) -> None:
    said = "pools.decode.env.TOKEN={env: MY_TOKEN}"
    assert "env: MY_TOKEN" in export_of(config(tmp_path), sets=[said])["rayservice.yaml"]
