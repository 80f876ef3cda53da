"""What is said before anything starts."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import PreflightFailed
from baton.serving.preflight.checks import (
    check_machine,
    evaluate_cluster,
    evaluate_machine,
    gpu_findings,
    memory_findings,
    node_version_findings,
    replica_bytes,
)
from baton.serving.preflight.facts import (
    ClusterFacts,
    MachineFacts,
    PortFact,
    PortListener,
    available_memory_bytes,
    installed_versions,
    port_listener,
)
from baton.serving.preflight.named_files import source_findings
from tests.serving.configs import SMALL, written

GIB = 1024**3
GOOD = MachineFacts(
    port=PortFact(key="server.port", host="127.0.0.1", port=8123, free=True),
    available_memory_bytes=1024 * GIB,
    gpus=0,
    versions={"ray": "2.60.0", "vllm": "0.32.0", "nixl": "1.5.1", "torch": "2.13.0+cpu"},
)

ROOMY = ClusterFacts(cpus=64, gpus=0, versions={})


def config(tmp_path: Path, *sets: str) -> DeploymentConfig:
    return written(tmp_path, SMALL, *sets)


def test_a_machine_that_has_everything_is_silent(tmp_path: Path) -> None:
    findings = evaluate_machine(config(tmp_path), GOOD)
    assert findings.errors == ()
    assert findings.warnings == ()


@pytest.mark.parametrize(
    ("listener", "told"),
    [
        (PortListener(pid=17, program="nginx"), "nginx (pid 17)"),
        (PortListener(pid=None), "another user's process"),
        (None, "not this machine's"),
    ],
)
def test_a_port_in_use_names_who_listens(
    tmp_path: Path, listener: PortListener | None, told: str
) -> None:
    facts = replace(GOOD, port=replace(GOOD.port, free=False, listener=listener))
    (line,) = evaluate_machine(config(tmp_path), facts).errors
    assert "127.0.0.1:8123" in line
    assert told in line
    assert "server.port" in line


def test_the_listener_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = port_listener(server.getsockname()[1])
        assert found is not None
        assert found.pid == os.getpid()
        port = server.getsockname()[1]
    assert port_listener(port) is None


def test_a_model_path_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    (line,) = source_findings(config(tmp_path, f"model.source={missing}").models)
    assert str(missing) in line
    assert "does not exist" in line


def test_a_model_path_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    (line,) = source_findings(config(tmp_path, f"model.source={tmp_path / 'weights.bin'}").models)
    assert "is not a directory" in line


@pytest.mark.parametrize("source", ["meta-llama/Llama-3.1-8B-Instruct", "tiny"])
def test_hub_ids_are_not_taken_for_paths(tmp_path: Path, source: str) -> None:
    assert source_findings(config(tmp_path, f"model.source={source}").models) == ()


def test_too_little_memory_names_each_share(tmp_path: Path) -> None:
    two_prefill = config(tmp_path, "pools.prefill.replicas.initial=2")
    (line,) = memory_findings(two_prefill, 2 * GIB)
    assert "2 x prefill" in line
    assert "1 x decode" in line
    assert "2.0 GiB is available" in line


def test_memory_that_just_suffices_is_enough(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    enough = 1
    while memory_findings(chosen, enough * 1024**2):
        enough += 1
    assert enough > 2048, "two engines with 1 GiB of KV blocks each need at least those"
    assert memory_findings(chosen, enough * 1024**2 - 1024**2)


def test_what_a_pool_says_of_its_memory_is_believed(tmp_path: Path) -> None:
    chosen = config(tmp_path, "pools.decode.resources.memory=7GiB")
    assert replica_bytes(chosen, chosen.pools["decode"]) == 7 * GIB


def test_weights_on_disk_count(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    without = config(tmp_path, f"model.source={folder}")
    before = replica_bytes(without, without.pools["decode"])
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    assert replica_bytes(without, without.pools["decode"]) == before + 1000


def test_a_package_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    (error,) = evaluate_machine(
        config(tmp_path), replace(GOOD, versions={**GOOD.versions, "nixl": None})
    ).errors
    assert "nixl is not installed" in error


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ray": "2.99.1"}, "ray: got 2.99.1, expected 2.60"),
        ({"vllm": "0.34.0"}, "vllm: got 0.34.0, expected 0.32 or 0.33"),
        ({"vllm": "0.3.2"}, "vllm: got 0.3.2, expected 0.32 or 0.33"),
        ({"nixl": "1.6.0"}, "nixl: got 1.6.0, expected 1.5"),
        ({"torch": "2.15.0+cpu"}, "torch: got 2.15.0+cpu, expected 2.13 or 2.14"),
        ({"torch": "2.14.0"}, "torch: got 2.14.0, expected 2.13 with vllm 0.32.0"),
        ({"vllm": "0.33.0"}, "torch: got 2.13.0+cpu, expected 2.14 with vllm 0.33.0"),
    ],
)
def test_what_nobody_has_tried_does_not_start_unless_somebody_says_so(
    tmp_path: Path, changes: Mapping[str, str], told: str
) -> None:
    there = replace(GOOD, versions={**GOOD.versions, **changes})
    (error,) = evaluate_machine(config(tmp_path), there).errors
    assert error.startswith(told)
    assert "--allow-untested-versions" in error
    nodes = replace(ROOMY, versions={"10.0.0.1 (aa)": there.versions})
    assert evaluate_cluster(config(tmp_path), nodes).errors == (error,)
    allowed = config(tmp_path, "cluster.allow_untested_versions=true")
    findings = evaluate_machine(allowed, there)
    assert findings.errors == evaluate_cluster(allowed, nodes).errors == ()
    (warning,) = findings.warnings
    assert warning.startswith(told)


def test_simulated_engines_need_no_nixl_of_any_version(tmp_path: Path) -> None:
    simulated = written(
        tmp_path,
        "version: 1\nmodel: {source: tiny, max_len: 4096, engine: {kind: sim, block_size: 16}}\n"
        "pools: {prefill: {role: prefill}, decode: {role: decode}}\n",
    )
    for version in (None, "9.9.9"):
        there = replace(GOOD, versions={**GOOD.versions, "nixl": version})
        assert evaluate_machine(simulated, there).errors == ()


def test_an_argument_that_came_later_is_refused_before_anything_starts(tmp_path: Path) -> None:
    wanted = config(tmp_path, "model.api={reasoning_effort_map: {xhigh: high}}")
    (error,) = evaluate_machine(wanted, GOOD).errors
    assert error.startswith("models.tiny.api.reasoning_effort_map: got vllm 0.32.0, expected 0.33")
    versions: Mapping[str, str | None]
    versions = {**GOOD.versions, "vllm": "0.33.0", "torch": "2.14.0+cu130"}
    assert evaluate_machine(wanted, replace(GOOD, versions=versions)).errors == ()


def test_both_supported_builds_start(tmp_path: Path) -> None:
    versions: Mapping[str, str | None]
    versions = {"ray": "2.60.0", "vllm": "0.33.0", "nixl": "1.5.1", "torch": "2.14.0+cu130"}
    assert evaluate_machine(config(tmp_path), replace(GOOD, versions=versions)).errors == ()


def test_an_old_driver_of_gpus_that_are_asked_for_is_told(tmp_path: Path) -> None:
    versions: Mapping[str, str | None]
    versions = {"ray": "2.60.0", "vllm": "0.33.0", "nixl": "1.5.1", "torch": "2.14.0+cu130"}
    there = replace(GOOD, versions=versions, gpus=8, driver_cuda=(12, 4))
    asked = config(tmp_path, "pools.decode.resources.gpus=1")
    (error,) = evaluate_machine(asked, there).errors
    assert error.startswith("the GPU's driver speaks CUDA 12.4, and torch 2.14.0+cu130 is built")
    assert evaluate_machine(config(tmp_path), there).errors == ()
    assert evaluate_machine(asked, replace(there, driver_cuda=(13, 1))).errors == ()


def test_more_gpus_than_there_are_is_told(tmp_path: Path) -> None:
    both = [
        f"pools.{pool}.{key}=2"
        for pool in ("prefill", "decode")
        for key in ("resources.gpus", "parallel.tp")
    ]
    chosen = config(tmp_path, *both)
    (line,) = gpu_findings(chosen, 3)
    assert "4 GPUs" in line
    assert "3 are there" in line
    assert gpu_findings(chosen, 4) == ()


def test_key_files_that_are_not_there_stop_and_tenants_without_any_are_told(
    tmp_path: Path,
) -> None:
    keyed = f"tenants.acme.keys_file={tmp_path / 'acme.keys'}"
    findings = evaluate_machine(config(tmp_path, keyed, "tenants.other.weight=2"), GOOD)
    (error,) = findings.errors
    assert str(tmp_path / "acme.keys") in error
    (warning,) = findings.warnings
    assert "nobody can call as tenant 'other'" in warning
    (tmp_path / "acme.keys").touch()
    assert evaluate_machine(config(tmp_path, keyed), GOOD).errors == ()
    assert evaluate_machine(config(tmp_path, "tenants.default.weight=2"), GOOD).warnings == ()


def test_a_container_limit_bounds_the_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1000


def test_versions_that_differ_between_nodes_name_the_nodes() -> None:
    (line,) = node_version_findings(
        {
            "10.0.0.1": {"ray": "2.60.0", "vllm": "0.33.0"},
            "10.0.0.2": {"ray": "2.60.0", "vllm": "0.32.0"},
            "10.0.0.3": {"ray": "2.60.0"},
        }
    )
    assert "vllm" in line
    assert "0.33.0 on 10.0.0.1" in line
    assert "0.32.0 on 10.0.0.2" in line
    assert "none on 10.0.0.3" in line


def test_a_cluster_with_too_few_cpus_is_told(tmp_path: Path) -> None:
    chosen = config(tmp_path, "pools.decode.resources.cpus=8")
    small = ClusterFacts(cpus=8, gpus=0, versions={"10.0.0.1": GOOD.versions})
    (line,) = evaluate_cluster(chosen, small).errors
    assert "9 CPUs" in line
    assert evaluate_cluster(chosen, replace(small, cpus=9)).errors == ()


def test_all_findings_come_at_once_and_survive_pickling(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        chosen = config(tmp_path, f"server.port={port}", "model.source=/no/such/model")
        with pytest.raises(PreflightFailed) as caught:
            check_machine(chosen)
    assert len(caught.value.problems) >= 2
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert str(again) == str(caught.value)


def test_versions_are_read_without_importing() -> None:
    assert installed_versions(["pytest", "no-such-package"]) == {
        "pytest": pytest.__version__,
        "no-such-package": None,
    }


def test_weights_pass_through_the_memory_of_each_host_on_their_way_to_gpus(
    tmp_path: Path,
) -> None:
    gpu = ("pools.decode.resources.gpus=1", "model.source=Qwen/Qwen3-0.6B")
    small = config(tmp_path, *gpu)
    one = replica_bytes(small, small.pools["decode"])
    large = config(tmp_path, *gpu, "model.source=meta-llama/Llama-3.1-70B-Instruct")
    pool = large.pools["decode"]
    # Files are of 5 GB at most; all of the small model is in one.
    assert replica_bytes(large, pool) - one == pytest.approx(5e9 - 2 * 0.6e9, rel=0.1)
    assert replica_bytes(large, pool, hosts=2) - replica_bytes(large, pool) == 5_000_000_000
    more = config(tmp_path, *gpu, "pools.decode.engine.offload.host_memory=8GiB")
    assert replica_bytes(more, more.pools["decode"]) - one == 8 * GIB
