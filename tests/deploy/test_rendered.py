"""What is kept in `deploy/` is what the configurations render to, now."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from baton.config.derive.selectors import matches_labels
from baton.config.language.units import PATTERNS, Unit, parse_quantity
from baton.config.load import load_config, load_text
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import adapt_to_cluster
from baton.manifests.environment import ray_variables
from baton.manifests.export import Target, manifest_files
from baton.manifests.kubernetes.kuberay import RAY_VERSION, ray_service
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import CannotExport, ManifestSettings
from tests.deploy.python_checks import objects
from tests.deploy.rendered import EXAMPLES, FOLDER, export, render_committed, stray_files
from tests.repo.project import ROOT

AGAIN = "render them again: python -m tests.deploy.rendered --write"
ONE_GPU = ROOT / "configs" / "one-gpu.yaml"
"""Its replicas share a GPU, which pods cannot."""
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path != ONE_GPU]


def config(
    tmp_path: Path, *more: str, pool: str = "decode", gpus: int = 1, placement: str = "{}"
) -> Path:
    path = tmp_path / "config.yaml"
    lines = ["version: 1", "model: {source: org/model}", "pools:"]
    lines += [f"  {pool}: {{role: mixed, resources: {{gpus: {gpus}}}, parallel: {{tp: {gpus}}},"]
    lines += [f"    placement: {placement}}}"]
    path.write_text("\n".join([*lines, *more]) + "\n")
    return path


def export_of(
    path: Path, target: Target = Target.KUBERAY, *, sets: Sequence[str] = (), **settings: object
) -> dict[str, str]:
    given = ManifestSettings(**settings)  # type: ignore[arg-type]  # as the test has it
    files = manifest_files(target, load_config([path], sets=sets), given)
    return {name: content.decode() for name, content in files.items()}


def workers(path: Path, group: str, **settings: object) -> dict[str, object]:
    given = ManifestSettings(**settings)  # type: ignore[arg-type]  # as the test has it
    service = json.loads(
        json.dumps(ray_service(adapt_to_cluster(load_config([path])), given, rdma=False))
    )
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (found,) = (other for other in groups if other["groupName"] == group)
    assert isinstance(found, dict)
    return found


def test_nodes_are_labelled_with_values_that_the_selectors_of_their_pool_choose(
    tmp_path: Path,
) -> None:
    selectors = {"zone": "in(a, b)", "rack": "r7", "ray.io/market-type": "!spot", "row": "!in(x)"}
    path = config(tmp_path, placement=json.dumps({"labels": selectors}))
    labels = workers(path, "decode")["labels"]
    assert labels == {"zone": "a", "rack": "r7"}
    assert matches_labels(selectors, labels)
    assert "--labels=zone=a,rack=r7" in export_of(path, Target.SYSTEMD)["nodes/decode.env"]


def test_the_chart_knows_every_unit_of_a_size() -> None:
    helpers = (FOLDER / "gpu-example" / "helm" / "templates" / "_helpers.tpl").read_text()
    _, _, below = helpers.partition('{{- define "baton.bytes" -}}')
    known = dict(re.findall(r'"([A-Za-z]+)" (\d+)', below.partition("{{- end }}")[0]))
    pattern = PATTERNS[Unit.BYTES]
    assert set(known) == set(re.findall(r"[A-Za-z]*B\b", pattern))
    for unit, size in known.items():
        assert parse_quantity(f"1{unit}", Unit.BYTES) == float(size)


def test_committed_files_equal_the_rendered_ones() -> None:
    wanted = render_committed()
    differ = [
        name
        for name, content in wanted.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_bytes() != content
    ]
    assert not differ, AGAIN


def test_nothing_else_is_kept() -> None:
    assert stray_files() == [], AGAIN


def test_every_example_is_kept() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(EXAMPLES)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_application_gets_the_configuration_that_was_given(path: Path) -> None:
    deployment = adapt_to_cluster(load_config([path]))
    assert load_text(json.dumps(deployment.explicit_values)) == deployment.config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_there_are_nodes_for_every_pool_as_large_as_it_may_get(path: Path) -> None:
    loaded = load_config([path]).config
    for name, pool in loaded.pools.items():
        group = workers(path, name)
        assert group["maxReplicas"] == pool.replicas.max
        resources = group["resources"]
        assert isinstance(resources, dict)
        hosts = group["numOfHosts"]
        assert isinstance(hosts, int)
        assert int(resources.get("GPU", 0)) * hosts == pool.resources.gpus
        assert int(resources["CPU"]) * hosts >= pool.resources.cpus


def test_a_replica_with_more_gpus_than_a_node_spans_several(tmp_path: Path) -> None:
    path = config(tmp_path, gpus=16)
    assert workers(path, "decode")["numOfHosts"] == 2
    assert workers(path, "decode", gpus_per_node=16)["numOfHosts"] == 1
    with pytest.raises(CannotExport, match="cannot be shared evenly by 3 nodes"):
        export_of(path, gpus_per_node=7)


def test_pods_that_would_have_to_share_a_gpu_are_refused() -> None:
    with pytest.raises(CannotExport, match=r"got 0\.5 GPUs for a replica, expected whole GPUs"):
        export_of(ONE_GPU)


def test_rdma_is_asked_for_where_the_configuration_requires_it(tmp_path: Path) -> None:
    without = export_of(config(tmp_path))["rayservice.yaml"]
    required = export_of(config(tmp_path, "transfer: {require_rdma: true}"))["rayservice.yaml"]
    assert "rdma/hca" not in without
    assert "rdma/hca" in required
    assert "IPC_LOCK" in required


def test_keys_are_mounted_where_the_application_looks_for_them(tmp_path: Path) -> None:
    files = export_of(config(tmp_path, "tenants: {acme: {keys_file: secrets/acme.keys}}"))
    assert "keys_file: /etc/baton/keys/acme.keys" in files["rayservice.yaml"]
    assert "mountPath: /etc/baton/keys" in files["rayservice.yaml"]
    assert "secretName: baton-keys" in files["rayservice.yaml"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("security: {tls: {cert_file: a.pem, key_file: a.key}}", "does not use TLS"),
        ("tenants: {a: {keys_file: a/k}, b: {keys_file: b/k}}", "would be one file"),
    ],
)
def test_an_impossible_cluster_setting_is_refused(tmp_path: Path, more: str, why: str) -> None:
    with pytest.raises(CannotExport, match=why):
        export_of(config(tmp_path, more))


@pytest.mark.parametrize("pool", ["head", "my_pool"])
def test_a_pool_whose_name_no_group_of_nodes_may_have_is_refused(tmp_path: Path, pool: str) -> None:
    with pytest.raises(CannotExport, match="groups of nodes"):
        export_of(config(tmp_path, pool=pool))


@pytest.mark.parametrize("name", ["", "Baton", "-x", "a" * 41])
def test_a_name_that_kubernetes_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(CannotExport, match="--name"):
        ManifestSettings(name=name)


@pytest.mark.parametrize("image", ["", " ", "registry/baton: tag", "a\nb"])
def test_an_image_that_has_no_name_is_refused(image: str) -> None:
    with pytest.raises(CannotExport, match="--image"):
        ManifestSettings(image=image)


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        *(("::1", "[::1]"), ("10.0.0.5", "10.0.0.5"), ("::", "127.0.0.1")),
        *(("0.0.0.0", "127.0.0.1"), ("fd00::2", "[fd00::2]")),  # noqa: S104 - read only
    ],
)
def test_compose_asks_where_the_metrics_are(tmp_path: Path, host: str, asked: str) -> None:
    seen = f'{{metrics: {{host: "{host}", port: 9500}}, token_file: /t}}'
    files = export_of(config(tmp_path, f"observability: {seen}"), Target.COMPOSE)
    assert f'"http://{asked}:9500/sd"' in files["prometheus.yaml"]


@pytest.mark.parametrize(
    ("metrics", "why"),
    [("{port: 0}", r"metrics\.port is 0"), ("{enabled: false}", "nothing to scrape")],
)
def test_compose_is_refused_where_metrics_cannot_be_scraped(
    tmp_path: Path, metrics: str, why: str
) -> None:
    path = config(tmp_path, f"observability: {{metrics: {metrics}}}")
    with pytest.raises(CannotExport, match=why):
        export_of(path, Target.COMPOSE)


def test_compose_keeps_metrics_as_long_as_the_alerts_ask_for(example: Path) -> None:
    page = (ROOT / "docs" / "operations" / "alerts.md").read_text()
    (kept,) = set(re.findall(r"--storage\.tsdb\.retention\.time=\w+", page))
    assert f'"{kept}"' in (example / "compose" / "compose.yaml").read_text()


def test_a_machine_that_ends_tls_itself_gets_one_unit_and_none_for_a_cluster(
    tmp_path: Path,
) -> None:
    path = config(tmp_path, "security: {tls: {cert_file: a.pem, key_file: a.key}}")
    assert set(export_of(path, Target.SYSTEMD)) == {"baton.service", "baton.yaml"}


def test_the_schema_of_the_chart_has_only_what_helm_understands(example: Path) -> None:
    assert "(?=" not in (example / "helm" / "values.schema.json").read_text()


def test_where_ingresses_are_the_front_serve_keeps_to_the_head_and_to_itself(
    tmp_path: Path,
) -> None:
    path = config(tmp_path, "server: {api_server: rust, listener: ingress, port: 8443}")
    loaded = load_config([path])
    told = serve_config(adapt_to_cluster(loaded))
    assert told["proxy_location"] == "HeadOnly"
    assert told["http_options"] == {"host": "127.0.0.1", "port": 21002}
    variables = ray_variables(loaded.config)
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert variables["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] == "21004"
    front = json.dumps(workers(path, "ingress"))
    assert '"containerPort": 8443' in front
    assert '{"path": "/-/healthz", "port": 8443}' in front


@pytest.mark.parametrize(
    ("host", "told", "metrics"),
    [("::1", "::0", "::"), ("::", "::0", "::"), ("fd00::2", "fd00::2", "::")],
)
def test_a_deployment_at_ipv6_serves_both_versions_in_a_cluster(
    tmp_path: Path, host: str, told: str, metrics: str
) -> None:
    seen = f'observability: {{metrics: {{host: "{host}"}}, token_file: /t}}'
    path = config(tmp_path, f'server: {{host: "{host}"}}\n{seen}')
    there = adapt_to_cluster(load_config([path]))
    assert serve_config(there)["http_options"] == {"host": told, "port": 8000}
    assert there.config.observability.metrics.host == metrics


def test_the_chart_tells_serve_the_same(tmp_path: Path) -> None:
    path = config(tmp_path, "server: {api_server: rust, listener: ingress}")
    files = export_of(path, Target.HELM)
    told = serve_config(adapt_to_cluster(load_config([path])))["http_options"]
    assert told == {"host": "127.0.0.1", "port": 21002}
    assert "  host: 127.0.0.1\n  port: 21002\n" in files["templates/_helpers.tpl"]
    assert 'RAY_SERVE_ENABLE_HA_PROXY: "0"' in files["values.yaml"]


def test_ray_is_the_one_in_the_lock() -> None:
    assert f"\nray=={RAY_VERSION} " in (ROOT / "requirements" / "cpu.lock").read_text()


def test_everything_belongs_to_one_namespace_and_carries_the_name(tmp_path: Path) -> None:
    given = ManifestSettings(name="mine", namespace="theirs")
    for name, content in manifest_files(
        Target.KUBERAY, load_config([config(tmp_path)]), given
    ).items():
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(content)
    for object_ in objects(tmp_path / "out"):
        metadata = object_["metadata"]
        assert isinstance(metadata, dict)
        assert metadata["namespace"] == "theirs"
        assert metadata["name"].startswith("mine")


def test_an_export_is_the_same_every_time(tmp_path: Path) -> None:
    first = export("gpu-example", Target.HELM, tmp_path / "first")
    second = export("gpu-example", Target.HELM, tmp_path / "second")
    for path in first.rglob("*.*"):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()


# -------------------------------------------------------------------- texts in YAML


ODD = (
    "  {% for m in messages %}\n{{ m }}\n{% endfor %}",
    "\n{{ x }}\n",
    "\n",
    "a\n\n",
    "a\n  \nb",
    "a\n  ",
    "\ta\nb",
    "a\r\nb",
    "a\x0cb\nc",
    "a\x7f\x85\u2028\ufeffb",
    "\U0001f600\U000e0001",
    "0xff",
    "0XAB",
    "0b",
    "Yes",
    "1e3",
)
LINES = st.text(st.sampled_from(["a", " ", "\n", "\t", "#", ":", "-", "\r", "\x85"]), max_size=12)


def read(text: str) -> list[object]:
    """What readers of YAML 1.1 and 1.2 make of it."""
    return [yaml.safe_load(text), YAML(typ="safe", pure=True).load(text)]


@pytest.mark.parametrize("text", ODD)
def test_an_odd_text_is_read_as_it_was_written(text: str) -> None:
    value = {"args": [{"template": text}, text]}
    assert read(yaml_text(value)) == [value, value]


@given(text=LINES)
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    value = {"args": [{"template": text}, text]}
    assert read(yaml_text(value)) == [value, value]


@pytest.mark.parametrize("text", ["a\nb", "a\n\n  b\n", "if:\n\tb  \n"])
def test_a_long_text_that_survives_it_is_a_block(text: str) -> None:
    written = yaml_text({"key": text})
    assert written.startswith("key: |")
    assert read(written) == [{"key": text}] * 2


@pytest.mark.parametrize("text", ["0xff", "0XFF", "0xffff"])
def test_strings_that_read_as_numbers_are_quoted(text: str) -> None:
    assert yaml_text({"key": text}) == f'key: "{text}"\n'
