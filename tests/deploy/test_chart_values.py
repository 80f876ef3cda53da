"""Every value of the chart has an effect, and every combination that is rendered is valid.

`make check-deploy` fetches Helm and runs these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import pytest
import yaml

from baton.config.load import load_config
from baton.manifests.export import Target, manifest_files
from baton.manifests.settings import ManifestSettings
from tests.deploy import python_checks, tool_checks
from tests.deploy.rendered import export
from tests.repo.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

Object = dict[str, Any]
_SCHEDULING: Final[Object] = {
    "nodeSelector": {"rack": "r7"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
            }
        }
    },
}
_INGRESS: Final[Object] = {
    "enabled": True,
    "className": "nginx",
    "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "4m"},
    "hosts": ["llm.example.com", "llm2.example.com"],
}
_TLS: Final[Object] = {"tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}]}
_CONSOLE_OFF: Final[Object] = {"console": {"enabled": False}}
_METRICS_OFF: Final[Object] = {"metrics": {"enabled": False}}
MATRIX: Final[Mapping[str, Object]] = {
    "defaults": {},
    "node port": {"service": {"type": "NodePort"}},
    "load balancer": {"service": {"type": "LoadBalancer", "annotations": {"cloud/nlb": "true"}}},
    "ingress": {"ingress": {"enabled": True}},
    "ingress with TLS": {"ingress": _INGRESS | _TLS},
    "other names": {"nameOverride": "llm"},
    "another name": {"fullnameOverride": "llm", "ingress": _INGRESS},
    "image": {
        "image": {
            "repository": "registry:5000/llm/baton",
            "tag": "",
            "digest": "sha256:" + "0" * 64,
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "registry"}],
        }
    },
    "own service account": {"serviceAccount": {"create": True, "annotations": {"role": "arn"}}},
    "existing service account": {"serviceAccount": {"name": "llm"}},
    "environment": {
        "extraEnv": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
    },
    "scheduling": {
        "scheduling": {
            **dict.fromkeys(("head", "ingress", "prefill", "decode", "mixed"), _SCHEDULING),
            "pools": {"decode": _SCHEDULING},
        },
        "gpu": {"nodeSelector": {"gpu": "true"}, "tolerations": [{"operator": "Exists"}]},
    },
    "no console": {"config": {"observability": _CONSOLE_OFF}},
    "no metrics": {"config": {"observability": _METRICS_OFF}},
    "neither": {"config": {"observability": _CONSOLE_OFF | _METRICS_OFF}},
    "no monitoring": {"monitoring": False},
    "runbooks": {"runbooks": "https://docs.example.com/runbooks/"},
    "RDMA": {"rdma": {"enabled": True}},
    "Redis": {"redis": {"redisAddress": "redis:6379"}},
    "tenants": {"config": {"tenants": {"acme": {"keys_file": "/etc/baton/keys/acme"}}}},
    "new claim": {"config": {"cluster": {"model_cache": {"size": "1TiB"}}}},
    "all": {
        "service": {"type": "LoadBalancer"},
        "ingress": _INGRESS | _TLS,
        "fullnameOverride": "llm",
        "nameOverride": "llm",
        "serviceAccount": {"create": True, "name": "llm"},
        "rdma": {"enabled": True},
    },
}
"""Values by what they are about."""
_CPU_EXAMPLE: Final = "models-example"
_CPU_ROWS: Final = ("defaults", "scheduling", "neither", "all")
"""Rows that a chart without GPUs is rendered with, too; its pools have other names."""


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("charts")
    return {
        "GPU": export("gpu-example", Target.HELM, folder / "gpu"),
        "CPU": export(_CPU_EXAMPLE, Target.HELM, folder / "cpu"),
    }


def objects_of(chart: Path, values: Object) -> list[Object]:
    found, made = tool_checks.helm(chart, values)
    assert found == []
    return made


def of_kind(made: list[Object], kind: str) -> list[Object]:
    return [entry for entry in made if entry["kind"] == kind]


def pods(made: list[Object]) -> dict[str, Object]:
    """The template of each group's pods."""
    (service,) = of_kind(made, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]} | {
        group["groupName"]: group for group in cluster["workerGroupSpecs"]
    }
    return {name: group["template"] for name, group in groups.items()}


def test_every_row_of_the_matrix_is_valid_kubernetes(
    charts: Mapping[str, Path], tmp_path: Path
) -> None:
    findings = []
    everything = tmp_path / "everything"
    everything.mkdir()
    for accelerator, chart in charts.items():
        cases = MATRIX if accelerator == "GPU" else {row: _for_cpu(row) for row in _CPU_ROWS}
        results = tool_checks.helm_results(chart, list(cases.values()))
        for row, result in zip(cases, results, strict=True):
            folder = tmp_path / f"{accelerator} {row}"
            folder.mkdir()
            text = "---\n".join(
                text for path, text in result.files.items() if path.endswith(".yaml")
            )
            (folder / "all.yaml").write_text(text)
            (everything / f"{folder.name}.yaml").write_text(text)
            found = [*result.findings, *python_checks.check_ray_service(folder)]
            findings += [f"{folder.name}: {line}" for line in found]
    assert findings == []
    assert tool_checks.check_core_kinds(everything) == []
    assert tool_checks.check_prometheus_operator(everything) == []


def _for_cpu(row: str) -> Object:
    values = dict(MATRIX[row])
    if "scheduling" in values:
        values["scheduling"] = values["scheduling"] | {"pools": {}}
    return values


# -------------------------------------------------------------------- each value


CHANGED: Final[Mapping[str, object]] = {
    "image.pullPolicy": "Always",
    "image.digest": "sha256:00",
    "service.type": "NodePort",
    "service.annotations": {"a": "b"},
    "ingress.tls": [{"secretName": "tls"}],
    "ingress.hosts": ["llm.example.com"],
    "ingress.annotations": {"a": "b"},
    "serviceAccount.annotations": {"a": "b"},
    "extraEnv": [{"name": "A", "value": "b"}],
    "image.pullSecrets": [{"name": "registry"}],
    "runbooks": "https://docs.example.com",
    "redis": {"redisAddress": "redis:6379"},
    "memory.weights": {"meta-llama/Llama-3.1-8B-Instruct": "1GiB"},
    "scheduling.pools": {"decode": {"nodeSelector": {"a": "b"}}},
    "probe.command": ["true"],
    "gpu.perNode": 16,
}
"""Values for those that cannot be changed by their type alone."""
CONTEXT: Final[Object] = {
    "ingress": {"enabled": True},
    "serviceAccount": {"create": True},
    "rdma": {"enabled": True},
    "config": {
        "pools": {
            "spare": {
                "model": "llama-8b",
                "role": "mixed",
                "parallel": {"tp": 16},
                "resources": {"gpus": 16},
            }
        }
    },
}
"""With what every value has an effect."""


def leaves(values: Object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value by its path; a mapping of any keys is one value."""
    for key, value in values.items():
        where = f"{path}{key}"
        if where == "config":
            continue
        is_section = isinstance(value, dict) and where not in _MAPPINGS and value != {}
        if is_section:
            yield from leaves(cast("Object", value), f"{where}.")
        else:
            yield where, value


_MAPPINGS: Final = {"environment", "autoscaler", "podSecurityContext", "memory.weights"}


def changed(path: str, value: object) -> object:
    if path in CHANGED:
        return CHANGED[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}x" if value else "x"
    if path.endswith("tolerations"):
        return [{"operator": "Exists"}]
    return {"added": {} if path.endswith("affinity") else "x"}


def at(path: str, value: object) -> Object:
    for key in reversed(path.split(".")):
        value = {key: value}
    return cast("Object", value)


def merged(*parts: Object) -> Object:
    whole: Object = {}
    for part in parts:
        for key, value in part.items():
            old = whole.get(key)
            is_section = isinstance(old, dict) and isinstance(value, dict)
            whole[key] = merged(cast("Object", old), value) if is_section else value
    return whole


def default_values(chart: Path) -> Object:
    (values,) = python_checks.documents(chart / "values.yaml")
    return values


def test_every_value_changes_what_is_rendered(charts: Mapping[str, Path]) -> None:
    paths = dict(leaves(merged(default_values(charts["GPU"]), CONTEXT)))
    assert CHANGED.keys() <= paths.keys()
    cases = [merged(CONTEXT, at(path, changed(path, value))) for path, value in paths.items()]
    before, *after = tool_checks.helm_results(charts["GPU"], [CONTEXT, *cases])
    assert before.findings == []
    results = dict(zip(paths, after, strict=True))
    assert {path: result.findings for path, result in results.items() if result.findings} == {}
    assert [path for path, result in results.items() if result.files == before.files] == []


def test_an_unset_value_is_named_and_never_an_error_of_a_template(
    charts: Mapping[str, Path],
) -> None:
    values = default_values(charts["GPU"])
    leaf_paths = [path for path in dict(leaves(values)) if "." in path]
    config_paths = ["config.server", "config.observability.metrics.port"]
    cases = [list(values), leaf_paths, config_paths]
    results = tool_checks.helm_results(
        charts["GPU"], [merged(*(at(path, None) for path in paths)) for paths in cases]
    )
    for paths, result in zip(cases, results, strict=True):
        (finding,) = result.findings
        missing = set(re.findall(r"'(\w+)'", " ".join(re.findall("missing prop.*", finding))))
        assert missing == {path.rpartition(".")[2] for path in paths}


def test_a_value_that_the_chart_does_not_know_is_refused(charts: Mapping[str, Path]) -> None:
    former: Object = {"console": False, "keys": True, "imagePullSecrets": [], "image": "baton:1"}
    cases = [{key: value} for key, value in former.items()]
    for key, result in zip(former, tool_checks.helm_results(charts["GPU"], cases), strict=True):
        assert any(key in line for line in result.findings)


def test_every_value_has_a_comment(example: Path) -> None:
    lines = (example / "helm" / "values.yaml").read_text().splitlines()
    key_of = re.compile(r"( *)[A-Za-z]+:")
    free_keys: int | None = None
    without = []
    for before, line in zip(["", *lines], lines, strict=False):
        match = key_of.match(line)
        if match is None:
            continue
        depth = len(match[1])
        if free_keys is not None and depth > free_keys:
            continue
        name = line.strip().partition(":")[0]
        free_keys = depth if name in {"config", "weights", *_MAPPINGS} else None
        if not before.strip().startswith("#"):
            without.append(line)
    assert without == []


# -------------------------------------------------------------------- what they do


def test_without_metrics_and_console_nothing_asks_for_their_secret(
    charts: Mapping[str, Path],
) -> None:
    made = objects_of(charts["GPU"], MATRIX["neither"])
    # The configuration names the file of the token, which nobody reads then.
    assert "baton-console" not in json.dumps(made)
    assert of_kind(made, "ScrapeConfig") == []
    assert "observe" not in json.dumps(pods(made)["head"])


@pytest.mark.parametrize("row", ["no console", "no metrics"])
def test_the_console_s_service_has_a_port_where_one_of_both_is_served(
    charts: Mapping[str, Path], row: str
) -> None:
    made = objects_of(charts["GPU"], MATRIX[row])
    head = pods(made)["head"]["spec"]
    ports = {port["name"] for port in head["containers"][0]["ports"]}
    (console,) = [
        entry for entry in of_kind(made, "Service") if entry["metadata"]["name"] == "baton-console"
    ]
    assert console["spec"]["ports"][0]["targetPort"] in ports
    assert "baton-console" in json.dumps(head["volumes"])


@pytest.mark.parametrize("sets", ["console", "metrics"])
def test_a_part_that_is_off_is_off_in_the_manifests_too(
    charts: Mapping[str, Path], tmp_path: Path, sets: str
) -> None:
    loaded = load_config(
        [ROOT / "configs/gpu-example.yaml"], sets=[f"observability.{sets}.enabled=false"]
    )
    for name, content in manifest_files(Target.KUBERAY, loaded, ManifestSettings()).items():
        (tmp_path / name).write_bytes(content)
    theirs = [entry for entry in python_checks.objects(tmp_path) if entry["kind"] != "RayService"]
    ours = [
        entry
        for entry in objects_of(
            charts["GPU"], {"config": {"observability": {sets: {"enabled": False}}}}
        )
        if entry["kind"] != "RayService"
    ]
    assert sorted(map(json.dumps, ours)) == sorted(map(json.dumps, theirs))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"fullnameOverride": "llm"}, "llm"),
        ({"nameOverride": "llm"}, "baton-llm"),
        ({"fullnameOverride": "x", "nameOverride": "llm"}, "x"),
    ],
)
def test_a_name_is_everywhere_and_services_find_their_pods(
    charts: Mapping[str, Path], values: Object, name: str
) -> None:
    made = objects_of(charts["GPU"], values)
    assert all(entry["metadata"]["name"].startswith(name) for entry in made)
    labels = [template["metadata"]["labels"] for template in pods(made).values()]
    for service in of_kind(made, "Service"):
        selector = service["spec"]["selector"].items()
        assert any(selector <= pod.items() for pod in labels)
    text = json.dumps(pods(made))
    assert f'"{name}-console"' in text
    assert f'"{name}-hub"' in text


def test_a_release_whose_name_is_too_long_is_told_to_set_another(
    charts: Mapping[str, Path],
) -> None:
    found, _ = tool_checks.helm(charts["GPU"], name="a" * 41)
    assert any("set fullnameOverride" in line for line in found)
    found, _ = tool_checks.helm(charts["GPU"], {"fullnameOverride": "llm"}, name="a" * 41)
    assert found == []


def test_pools_are_scheduled_by_gpus_role_and_name_together(charts: Mapping[str, Path]) -> None:
    values: Object = {
        "gpu": {"nodeSelector": {"gpu": "yes", "rack": "any"}, "tolerations": [{"key": "gpu"}]},
        "scheduling": {
            "head": {"nodeSelector": {"disk": "fast"}},
            "decode": {"nodeSelector": {"rack": "r7"}, "tolerations": [{"key": "role"}]},
            "pools": {"decode": {"tolerations": [{"key": "pool"}], "affinity": {"a": {}}}},
        },
    }
    found = pods(objects_of(charts["GPU"], values))
    decode = found["decode"]["spec"]
    assert decode["nodeSelector"] == {"gpu": "yes", "rack": "r7"}
    assert [entry["key"] for entry in decode["tolerations"]] == ["gpu", "role", "pool"]
    assert decode["affinity"] == {"a": {}}
    assert found["prefill"]["spec"]["nodeSelector"] == {"gpu": "yes", "rack": "any"}
    assert found["head"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert "nodeSelector" not in found["ingress"]["spec"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"scheduling": {"pools": {"decoder": {}}}}, "scheduling.pools.decoder: got no such pool"),
        ({"extraEnv": [{"name": "HF_HOME", "value": "x"}]}, "which pods have already"),
        ({"runbooks": "docs/operations/runbooks"}, "runbooks"),
        ({"service": {"type": "ExternalName"}}, "type"),
    ],
    ids=str,
)
def test_a_value_without_an_effect_is_refused(
    charts: Mapping[str, Path], values: Object, why: str
) -> None:
    found, _ = tool_checks.helm(charts["GPU"], values)
    assert any(why in line for line in found)


@pytest.mark.parametrize(
    "pool",
    [
        {"parallel": {"tp": 8}, "resources": {"gpus": 8}},
        {"parallel": {"tp": 8, "pp": 2}, "resources": {"gpus": 16}},
        {"engine": {"offload": {"host_memory": "64GiB"}}, "resources": {"gpus": 1}},
        {"engine": {"kv_cache": "3GiB"}},
        {"resources": {"memory": "100GB"}},
    ],
    ids=str,
)
def test_a_pool_of_the_values_gets_the_memory_that_an_export_gives_it(
    charts: Mapping[str, Path], tmp_path: Path, pool: Object
) -> None:
    spare: Object = {"model": "llama-8b", "role": "mixed", **pool}
    loaded = load_config(
        [ROOT / "configs/gpu-example.yaml"], sets=[f"pools.spare={json.dumps(spare)}"]
    )
    for name, content in manifest_files(Target.KUBERAY, loaded, ManifestSettings()).items():
        (tmp_path / name).write_bytes(content)
    ours, theirs = (
        pods(made)["spare"]["spec"]["containers"][0]["resources"]
        for made in (
            objects_of(charts["GPU"], {"config": {"pools": {"spare": spare}}}),
            python_checks.objects(tmp_path),
        )
    )
    assert ours == theirs


def test_another_model_gets_the_memory_of_weights_that_are_unknown_or_given(
    charts: Mapping[str, Path],
) -> None:
    def memory(values: Object) -> int:
        found = pods(objects_of(charts["GPU"], values))["decode"]["spec"]["containers"][0]
        return int(found["resources"]["requests"]["memory"].removesuffix("Mi"))

    other: Object = {"config": {"models": {"llama-8b": {"source": "org/small"}}}}
    known = merged(other, {"memory": {"weights": {"org/small": "1GiB"}}})
    assert memory(other) - memory(known) == pytest.approx(5e9 / 2**20 - 1024, abs=1)


def test_alerts_link_to_the_runbooks_of_the_values_and_else_name_the_page(
    charts: Mapping[str, Path],
) -> None:
    def links(values: Object) -> set[str]:
        (rules,) = of_kind(objects_of(charts["GPU"], values), "PrometheusRule")
        return {
            rule["annotations"].get("runbook_url", "")
            for group in rules["spec"]["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }

    assert links({}) == {""}
    assert "https://docs.example.com/runbooks/BatonNoDecode.md" in links(MATRIX["runbooks"])
    assert "" not in links(MATRIX["runbooks"])


def test_the_notes_name_the_secrets_and_the_addresses(charts: Mapping[str, Path]) -> None:
    rows = ["defaults", "neither", "ingress with TLS", "load balancer", "tenants"]
    results = tool_checks.helm_results(charts["GPU"], [MATRIX[row] for row in rows])
    notes = {
        row: result.files["baton/templates/NOTES.txt"]
        for row, result in zip(rows, results, strict=True)
    }
    assert "create secret generic baton-console" in notes["defaults"]
    assert "port-forward svc/baton-console 9400" in notes["defaults"]
    assert "port-forward svc/baton 8000" in notes["defaults"]
    assert "baton-console" not in notes["neither"]
    assert "https://llm2.example.com/v1" in notes["ingress with TLS"]
    assert "get service baton" in notes["load balancer"]
    assert "baton-keys" in notes["tenants"]


def test_an_image_is_split_and_put_together_again(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    for number, image in enumerate(
        ("baton:1", "registry:5000/baton", "registry:5000/a/baton:1", f"a/baton:1@{digest}")
    ):
        settings = ManifestSettings(image=image)
        folder = tmp_path / str(number)
        loaded = load_config([ROOT / "configs/gpu-example.yaml"])
        for name, content in manifest_files(Target.HELM, loaded, settings).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        (result,) = tool_checks.helm_results(folder, [{}])
        (service,) = yaml.safe_load_all(result.files["baton/templates/rayservice.yaml"])
        head = pods([service])["head"]["spec"]["containers"][0]
        assert head["image"] == image
