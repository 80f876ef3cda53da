"""Where pods keep models of a hub, and what they ask for so that these have room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config.load import LoadedConfig, load_config, load_text
from baton.manifests.cluster_deployment import adapt_to_cluster, explicit_config_values
from baton.manifests.export import Target
from baton.manifests.settings import CannotExport
from tests.deploy.test_rendered import config, export_of
from tests.repo.project import ROOT

_GPU = ROOT / "configs" / "gpu-example.yaml"
_GIB = 1024**3


def pods(*sets: str) -> list[dict[str, Any]]:
    """Of a head, an ingress, a pool that prefills and one that decodes."""
    text = export_of(_GPU, Target.KUBERAY, sets=list(sets))["rayservice.yaml"]
    cluster = yaml.safe_load(text)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def models_of(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
    return {key: value for key, value in found.items() if key != "name"}


def folder_of(pod: dict[str, Any]) -> str:
    (container,) = pod["containers"]
    (mount,) = (item for item in container["volumeMounts"] if item["name"] == "models")
    (home,) = (item["value"] for item in container["env"] if item["name"] == "HF_HOME")
    assert mount["mountPath"] == home
    return str(home)


def requests_of(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["containers"]
    found: dict[str, str] = container["resources"]["requests"]
    return found


def mib(size: str) -> int:
    return int(size.removesuffix("Mi"))


def test_a_pod_that_keeps_its_own_model_goes_where_the_disk_has_room_for_it() -> None:
    head, ingress, *engines = pods()
    for pod in (head, ingress, *engines):
        assert models_of(pod) == {"emptyDir": {}}
        assert folder_of(pod) == "/models"
    assert all("ephemeral-storage" not in requests_of(pod) for pod in (head, ingress))
    for pod in engines:  # 8.03 thousand million parameters of two bytes
        assert mib(requests_of(pod)["ephemeral-storage"]) == pytest.approx(
            16.06e9 / 2**20, rel=0.01
        )


def test_weights_have_room_in_memory_on_their_way_to_the_gpus() -> None:
    *_, engine = pods()
    of_one_worker = mib(requests_of(engine)["memory"]) * 2**20
    assert of_one_worker == pytest.approx(5e9 + 1.5 * _GIB + 0.6 * _GIB, rel=0.01)
    *_, engine = pods("pools.decode.engine.offload.host_memory=64GiB")
    more = mib(requests_of(engine)["memory"]) * 2**20 - of_one_worker
    assert more == 64 * _GIB


def test_a_claim_that_is_there_is_shared_by_all_pods() -> None:
    for pod in pods("cluster.model_cache.claim=weights"):
        assert models_of(pod) == {"persistentVolumeClaim": {"claimName": "weights"}}
        assert "ephemeral-storage" not in requests_of(pod)


def test_a_claim_of_a_size_comes_with_the_manifests() -> None:
    sets = ["cluster.model_cache.size=500GiB", "cluster.model_cache.storage_class=shared"]
    files = export_of(_GPU, Target.KUBERAY, sets=sets)
    claim = yaml.safe_load(files["models.yaml"])
    assert claim["kind"] == "PersistentVolumeClaim"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "512000Mi"}},
        "storageClassName": "shared",
    }
    name = claim["metadata"]["name"]
    assert all(
        models_of(pod) == {"persistentVolumeClaim": {"claimName": name}} for pod in pods(*sets)
    )
    assert "models.yaml" in export_of(_GPU, Target.KUSTOMIZE, sets=sets)["base/kustomization.yaml"]
    assert "models.yaml" not in export_of(_GPU)


def test_a_folder_of_the_machines_is_the_same_in_their_pods() -> None:
    for pod in pods("cluster.model_cache.path=/data/models"):
        assert models_of(pod) == {"hostPath": {"path": "/data/models", "type": "DirectoryOrCreate"}}
        assert folder_of(pod) == "/data/models"


def test_a_folder_of_a_user_is_no_folder_of_pods(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="give the whole path"):
        export_of(config(tmp_path), sets=["cluster.model_cache.path=~/models"])


def test_machines_and_units_keep_models_in_the_folder_too() -> None:
    said = ["cluster.model_cache.path=/data/models"]
    cluster = export_of(_GPU, Target.RAY, sets=said)["cluster.yaml"]
    assert "-v /data/models:/data/models" in cluster
    units = export_of(_GPU, Target.SYSTEMD, sets=said)
    for unit in ("baton.service", "baton-node@.service"):
        assert "ReadWritePaths=-/data/models\n" in units[unit]
        assert "ReadWritePaths" not in export_of(_GPU, Target.SYSTEMD)[unit]


def test_pods_take_tokens_mirrors_and_proxies_from_secrets_alone() -> None:
    for pod in pods():
        (container,) = pod["containers"]
        assert container["envFrom"] == [
            {"secretRef": {"name": "baton-environment", "optional": True}}
        ]
        (token,) = (item for item in container["env"] if item["name"] == "HF_TOKEN")
        assert token["valueFrom"]["secretKeyRef"]["name"] == "baton-hub"


def test_the_token_of_the_shell_is_in_no_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_that_nobody_may_read")
    told = ":".join(("user", "secret"))
    monkeypatch.setenv("HTTPS_PROXY", f"http://{told}@proxy:3128")
    for target in Target:
        text = "".join(export_of(_GPU, target).values())
        assert "hf_that_nobody_may_read" not in text
        assert told not in text


def test_the_chart_has_the_size_of_weights_that_pods_request_as_disk() -> None:
    values = yaml.safe_load(export_of(_GPU, Target.HELM)["values.yaml"])
    requested = {requests_of(pod)["ephemeral-storage"] for pod in pods()[2:]}
    assert {size.removesuffix("B") for size in values["memory"]["weights"].values()} == requested


# -------------------------------------------------------------------- what pools inherit


MODEL = "models: {m: {source: org/model, engine: {dtype: bfloat16, extra: {seed: 1}}}}"


def loaded(tmp_path: Path, pool: str, *more: str) -> LoadedConfig:
    path = tmp_path / "config.yaml"
    lines = ["version: 1", MODEL, f"pools: {{decode: {{role: mixed, {pool}}}}}", *more]
    path.write_text("\n".join(lines) + "\n")
    return load_config([path])


def engine_of(written: object) -> object:
    found = json.loads(json.dumps(written))
    return found["pools"]["decode"].get("engine")


def test_a_pool_that_says_nothing_of_engines_is_exported_without_a_word_of_them(
    tmp_path: Path,
) -> None:
    given = loaded(tmp_path, "env: {A: b}")
    assert engine_of(explicit_config_values(given)) is None
    assert engine_of(adapt_to_cluster(given).explicit_values) is None


def test_a_change_of_the_models_options_reaches_pools_of_an_exported_file(tmp_path: Path) -> None:
    written = json.loads(
        json.dumps(explicit_config_values(loaded(tmp_path, "engine: {max_num_seqs: 8}")))
    )
    written["models"]["m"]["engine"] = {"dtype": "float16", "extra": {"seed": 2}}
    pool = load_text(json.dumps(written)).pools["decode"].engine
    assert (pool.dtype, pool.extra, pool.max_num_seqs) == ("float16", {"seed": 2}, 8)


def test_a_key_of_a_pool_is_kept_even_where_its_model_has_the_same(
    tmp_path: Path,
) -> None:
    given = loaded(tmp_path, "engine: {dtype: bfloat16, extra: {swap_space: 2}}")
    wanted = {"dtype": "bfloat16", "extra": {"swap_space": 2}}
    assert engine_of(explicit_config_values(given)) == wanted


@pytest.mark.parametrize("more", [(), ("tenants: {a: {}}",)])
def test_the_exported_file_means_what_the_given_one_does(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    given = loaded(tmp_path, "engine: {max_num_seqs: 8}", *more)
    written = explicit_config_values(given)
    assert load_text(json.dumps(written)) == given.config
    assert engine_of(written) == {"max_num_seqs": 8}


# -------------------------------------------------------------------- limits of pods


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


def test_a_disabled_metrics_port_conflicts_with_nothing(tmp_path: Path) -> None:
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
