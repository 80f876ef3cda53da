"""What a start refuses and warns of, and that `baton doctor` judges it alike."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import PreflightFailed
from baton.domain.names.distribution import pip_install_engine
from baton.serving.checks.configuration import (
    INGRESS_BYTES,
    RAY_BYTES,
    check_nodes,
    cluster_checks,
    replica_bytes,
)
from baton.serving.checks.facts import (
    ClusterFacts,
    MachineSnapshot,
    PortFact,
    PortListener,
    available_memory_bytes,
    installed_versions,
    port_listener,
)
from baton.serving.checks.result import CheckStatus, lines_with
from baton.serving.checks.start import check_machine, start_checks
from tests.serving.configs import SMALL, written
from tests.serving.test_doctor import GOOD, all_checks, with_files

GIB = 1024**3
PASS, WARN, FAIL = CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL
GPU_VERSIONS = {"ray": "2.60.0", "vllm": "0.33.0", "nixl": "1.5.1", "torch": "2.14.0+cu130"}
ON_GPUS = replace(GOOD, versions=GPU_VERSIONS, gpus=8, driver_cuda=(13, 1))
ROOMY = ClusterFacts(cpus=64, gpus=0, versions={})
SIMULATED = (
    "version: 1\nmodel: {source: tiny, max_len: 4096, engine: {kind: sim, block_size: 16}}\n"
    "pools: {prefill: {role: prefill}, decode: {role: decode}}\n"
)


class CheckCase(NamedTuple):
    """What is found of a machine and a configuration; `FOLDER` is that of the test."""

    name: str
    status: CheckStatus
    sets: Sequence[str] = ()
    changes: Mapping[str, Any] = MappingProxyType({})
    found: str = ""
    fix: str = ""


def config(tmp_path: Path, *sets: str) -> DeploymentConfig:
    return written(tmp_path, SMALL, *sets)


def start_lines(
    status: CheckStatus, chosen: DeploymentConfig, machine: MachineSnapshot = GOOD
) -> tuple[str, ...]:
    return lines_with(status, start_checks(chosen, with_files(machine, chosen)))


def refusals(chosen: DeploymentConfig, machine: MachineSnapshot = GOOD) -> tuple[str, ...]:
    return start_lines(FAIL, chosen, machine)


def cluster_refusals(chosen: DeploymentConfig, facts: ClusterFacts) -> tuple[str, ...]:
    return lines_with(FAIL, cluster_checks(chosen, facts))


def port(listener: PortListener | None) -> PortFact:
    return PortFact(key="server.port", host="127.0.0.1", port=80, free=False, listener=listener)


def test_a_machine_that_has_everything_passes_every_check(tmp_path: Path) -> None:
    assert {check.status for check in start_checks(config(tmp_path), GOOD)} == {PASS}


GPU = "pools.decode.resources.gpus=1"
KEYS = "tenants.acme.keys_file=FOLDER/keys"
TWO_GPUS = [
    f"pools.{pool}.{key}=2"
    for pool in ("prefill", "decode")
    for key in ("resources.gpus", "parallel.tp")
]
JUDGEMENTS = [
    CheckCase(
        "ports", FAIL, (), {"ports": (port(PortListener(pid=17, program="nginx")),)},
        "127.0.0.1:80 (server.port) is held by nginx (pid 17)",
        "stop it, or set server.port to another",
    ),
    CheckCase(
        "ports", FAIL, (), {"ports": (port(PortListener(pid=None)),)},
        "another user's process", "stop it",
    ),
    CheckCase("ports", FAIL, (), {"ports": (port(None),)}, "not this machine's", "stop it"),
    CheckCase(
        "model", FAIL, ("model.source=FOLDER/nowhere",), {},
        "models.nowhere.source: FOLDER/nowhere does not exist", "give the directory of a model",
    ),
    CheckCase(
        "model", FAIL, ("model.source=FOLDER/weights.bin",), {},
        "is not a directory", "its id on the hub",
    ),
    CheckCase(
        "model", FAIL, ("model.source=FOLDER",), {},
        "source: FOLDER has no config.json", "the directory that the model was",
    ),
    CheckCase("model", PASS, ("model.source=meta-llama/Llama-3.1-8B-Instruct",), {}),
    CheckCase("model", PASS, ("model.source=tiny",), {}),
    CheckCase(
        "memory", FAIL, ("pools.prefill.replicas.initial=2",),
        {"available_memory_bytes": 2 * GIB},
        "not enough memory: about", "lower engine.kv_cache or replicas.initial",
    ),
    CheckCase(
        "versions", FAIL, (), {"versions": {**GOOD.versions, "vllm": None, "nixl": None}},
        "got ray 2.60.0, vllm missing, nixl missing, torch 2.13.0+cpu",
        f"install vllm and nixl: {pip_install_engine()}",
    ),
    CheckCase("versions", PASS, (), {"versions": GPU_VERSIONS}),
    CheckCase(
        "API arguments", FAIL, ("model.api={reasoning_effort_map: {xhigh: high}}",), {},
        "models.tiny.api.reasoning_effort_map: got vllm 0.32.0, expected 0.33 or later",
        "remove it, or install that",
    ),
    CheckCase(
        "API arguments", PASS, ("model.api={reasoning_effort_map: {xhigh: high}}",),
        {"versions": GPU_VERSIONS},
    ),
    CheckCase(
        "GPUs", FAIL, TWO_GPUS, {"gpus": 3},
        "the pools ask for 4 GPUs to start with, 3 are there", "or add GPUs",
    ),
    CheckCase("GPUs", PASS, TWO_GPUS, {"gpus": 4}),
    CheckCase(
        "GPU driver", FAIL, (GPU,),
        {"versions": GPU_VERSIONS, "gpus": 8, "driver_cuda": (12, 8)},
        "the GPU's driver supports CUDA 12.8, and torch 2.14.0+cu130 is built for 13.0",
        "580 or newer",
    ),
    CheckCase(
        "GPU driver", WARN, (GPU,), {"versions": GPU_VERSIONS, "gpus": 8},
        "its CUDA version is unknown", "nvidia-smi",
    ),
    CheckCase(
        "GPU driver", PASS, (GPU,),
        {"versions": GPU_VERSIONS, "gpus": 8, "driver_cuda": (13, 0)},
    ),
    CheckCase(
        "API keys", FAIL, ("tenants.acme.keys_file=FOLDER/none",), {},
        "FOLDER/none: cannot be read", "baton keys list",
    ),
    CheckCase("API keys", FAIL, (KEYS,), {}, "FOLDER/keys:1", "correct these lines"),
    CheckCase(
        "API keys", WARN, ("tenants.other.weight=2",), {},
        "no client can call as tenant 'other'", "baton keys create --tenant other",
    ),
    CheckCase("API keys", PASS, ("tenants.default.weight=2",), {}),
    CheckCase(
        "TLS files", FAIL,
        ("security.tls.cert_file=FOLDER/none", "security.tls.key_file=FOLDER/keys"), {},
        "security.tls.cert_file: FOLDER/none cannot be read", "give a file that this user",
    ),
    CheckCase(
        "exposure", WARN, ("server.host=0.0.0.0",), {},
        "serves every client, without a key", "set server.host to 127.0.0.1",
    ),
    CheckCase(
        "contradictions", WARN,
        (
            "autoscaler={policy: static, scale_to_zero: true}",
            "pools.decode.replicas={min: 0, initial: 1}",
        ),
        {},
        "autoscaler.scale_to_zero: no effect with autoscaler.policy: static",
        "remove one of them",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", JUDGEMENTS, ids=lambda case: f"{case.name}-{case.status}")
def test_a_start_and_the_doctor_report_alike(tmp_path: Path, case: CheckCase) -> None:
    (tmp_path / "weights.bin").touch()
    (tmp_path / "keys").write_text("nonsense\n")
    chosen = config(tmp_path, *(line.replace("FOLDER", str(tmp_path)) for line in case.sets))
    machine = with_files(replace(GOOD, **case.changes), chosen)
    of_doctor, of_start = (
        [check for check in checks if check.name == case.name]
        for checks in (all_checks(machine, chosen), start_checks(chosen, machine))
    )
    assert [check.status for check in (*of_doctor, *of_start)] == [case.status] * 2
    if case.status is not PASS:
        (line,) = lines_with(case.status, of_start)
        assert case.found.replace("FOLDER", str(tmp_path)) in line
        assert case.fix in line
        assert lines_with(case.status, of_doctor) == (line,)


def test_the_listener_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = port_listener(server.getsockname()[1])
        assert found is not None
        assert found.pid == os.getpid()
        port = server.getsockname()[1]
    assert port_listener(port) is None


def test_too_little_memory_names_each_share(tmp_path: Path) -> None:
    two_prefill = config(tmp_path, "pools.prefill.replicas.initial=2")
    (line,) = refusals(two_prefill, replace(GOOD, available_memory_bytes=2 * GIB))
    assert "2 x prefill" in line
    assert "1 x decode" in line
    assert "2.0 GiB is available" in line


def test_memory_that_just_suffices_is_enough(tmp_path: Path) -> None:
    chosen = config(tmp_path)

    needed_bytes = RAY_BYTES + INGRESS_BYTES
    needed_bytes += sum(replica_bytes(chosen, pool) for pool in chosen.pools.values())
    assert needed_bytes > 2 * GIB, "two engines with 1 GiB of KV blocks each need those"
    assert refusals(chosen, replace(GOOD, available_memory_bytes=needed_bytes)) == ()
    assert refusals(chosen, replace(GOOD, available_memory_bytes=needed_bytes - 1))


def test_the_memory_setting_of_a_pool_is_used(tmp_path: Path) -> None:
    chosen = config(tmp_path, "pools.decode.resources.memory=7GiB")
    assert replica_bytes(chosen, chosen.pools["decode"]) == 7 * GIB


def test_weights_on_disk_count(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    without = config(tmp_path, f"model.source={folder}")
    before = replica_bytes(without, without.pools["decode"])
    (folder / "model.safetensors").write_bytes(b"x" * (2**20 + 1))
    # In whole MiB.
    assert replica_bytes(without, without.pools["decode"]) == before + 2 * 2**20


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
def test_an_untested_version_starts_only_when_allowed(
    tmp_path: Path, changes: Mapping[str, str], told: str
) -> None:
    there = replace(GOOD, versions={**GOOD.versions, **changes})
    chosen = config(tmp_path)
    (error,) = refusals(chosen, there)
    assert error.startswith(told)
    assert "--allow-untested-versions" in error
    for shown in (chosen, None):
        assert error in lines_with(FAIL, all_checks(there, shown))
    nodes = replace(ROOMY, versions={"10.0.0.1 (aa)": there.versions})
    assert cluster_refusals(chosen, nodes) == (error,)
    allowed = config(tmp_path, "cluster.allow_untested_versions=true")
    assert refusals(allowed, there) == cluster_refusals(allowed, nodes) == ()
    (warning,) = start_lines(WARN, allowed, there)
    assert warning.startswith(told)
    assert warning in lines_with(WARN, all_checks(there, allowed))


def test_simulated_engines_need_no_nixl_of_any_version(tmp_path: Path) -> None:
    simulated = written(tmp_path, SIMULATED)
    for version in (None, "9.9.9"):
        there = replace(GOOD, versions={**GOOD.versions, "nixl": version})
        assert refusals(simulated, there) == ()


def test_an_old_driver_of_unused_gpus_stops_no_start(tmp_path: Path) -> None:
    assert refusals(config(tmp_path), replace(ON_GPUS, driver_cuda=(12, 4))) == ()


def test_a_port_that_the_controller_can_do_without_stops_no_start(tmp_path: Path) -> None:
    taken = PortFact(key="observability.metrics.port", host="127.0.0.1", port=9400, free=False)
    assert refusals(config(tmp_path), replace(GOOD, ports=(*GOOD.ports, taken))) == ()


def test_a_container_limit_bounds_the_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1000


def test_versions_that_differ_between_nodes_name_the_nodes() -> None:
    found = check_nodes(
        {
            "10.0.0.1": {"ray": "2.60.0", "vllm": "0.33.0"},
            "10.0.0.2": {"ray": "2.60.0", "vllm": "0.32.0"},
            "10.0.0.3": {"ray": "2.60.0"},
        }
    )
    assert found.status is FAIL
    assert found.detail == (
        "package vllm differs between nodes: 0.32.0 on 10.0.0.2, 0.33.0 on 10.0.0.1, none on"
        " 10.0.0.3"
    )


def test_a_cluster_with_too_few_cpus_is_told(tmp_path: Path) -> None:
    chosen = config(tmp_path, "pools.decode.resources.cpus=8")
    small = ClusterFacts(cpus=8, gpus=0, versions={"10.0.0.1": GOOD.versions})
    (line,) = cluster_refusals(chosen, small)
    assert "9 CPUs" in line
    assert cluster_refusals(chosen, replace(small, cpus=9)) == ()


def test_all_findings_come_at_once_and_survive_pickling(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        chosen = config(tmp_path, f"server.port={port}", "model.source=/no/such/model")
        with pytest.raises(PreflightFailed) as caught:
            check_machine(chosen, warn=lambda _line: None)
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
