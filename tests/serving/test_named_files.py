"""Files that are read on other nodes: each says what it lacks before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.serving.checks.named_files import (
    NodeEligibility,
    NodeFiles,
    check_node_files,
    inspect_node_files,
    node_eligibility,
)
from baton.serving.checks.result import CheckStatus
from baton.serving.ray.autoscaler import NodeType

SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"
HEAD = NodeType(name="", resources={"node:__internal_head__": 1.0})
WORKER = NodeType(name="", resources={"CPU": 4.0}, labels={"rack": "a"})
AT = "cluster.address=10.0.0.1:6379"
DECODE_ONLY = NodeEligibility(ingress=False, controller=False, pools=("decode",))
FRONT = NodeEligibility(ingress=True, controller=False, pools=())


def config(*sets: str) -> DeploymentConfig:
    return load_config([SIM], env={}, sets=(AT, *sets)).config


def with_keys(path: Path) -> DeploymentConfig:
    return config(f"tenants.acme.keys_file={path}")


def test_ingresses_are_on_the_head_or_where_there_are_cpus_and_engines_where_they_fit() -> None:
    hidden = config("pools.decode.placement.labels.rack=b")
    assert node_eligibility(hidden, HEAD) == NodeEligibility(
        ingress=True, controller=False, pools=()
    )
    assert node_eligibility(hidden, WORKER) == NodeEligibility(
        ingress=False, controller=True, pools=("prefill",)
    )
    shown = config("server.host=0.0.0.0", "pools.decode.resources.cpus=8")
    assert not node_eligibility(shown, HEAD).ingress
    assert node_eligibility(shown, WORKER) == NodeEligibility(
        ingress=True, controller=True, pools=("prefill",)
    )


def test_a_key_file_counts_where_an_ingress_may_be_and_nowhere_else(tmp_path: Path) -> None:
    wanted = with_keys(tmp_path / "keys")
    (line,) = inspect_node_files(wanted, FRONT).missing
    assert f"{tmp_path / 'keys'}: cannot be read: No such file or directory" in line
    elsewhere = NodeEligibility(ingress=False, controller=True, pools=("prefill", "decode"))
    assert inspect_node_files(wanted, elsewhere) == NodeFiles()
    (tmp_path / "keys").write_text("")
    assert inspect_node_files(wanted, FRONT).missing == ()


def test_a_key_file_with_a_bad_line_is_refused_without_showing_the_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-secret\n")
    (line,) = inspect_node_files(with_keys(tmp_path / "keys"), FRONT).missing
    assert f"{tmp_path / 'keys'}:1" in line
    assert "sk-secret" not in line


@pytest.mark.parametrize(
    ("said", "duties"),
    [
        ("model.source=/no/such/model", DECODE_ONLY),
        ("model.source=/no/such/model", FRONT),
        ("model.adapters.law.source=/no/such/adapter",
         DECODE_ONLY),
        ("pools.decode.env.TOKEN={file: /no/such/file}",
         DECODE_ONLY),
        ("observability.token_file=/no/such/token",
         NodeEligibility(ingress=False, controller=True, pools=())),
    ],
)  # fmt: skip
def test_files_are_looked_for_on_the_nodes_of_their_processes(
    said: str, duties: NodeEligibility
) -> None:
    (line,) = inspect_node_files(config(said), duties).missing
    assert "/no/such/" in line
    nobody = NodeEligibility(ingress=False, controller=False, pools=())
    assert inspect_node_files(config(said), nobody).missing == ()


def test_files_missing_on_several_nodes_are_one_line_with_their_names() -> None:
    lacks, has = NodeFiles(missing=("keys: /k cannot be read",)), NodeFiles()
    missing, _ = check_node_files({"a": lacks, "b": has, "c": lacks})
    assert missing.status is CheckStatus.FAIL
    assert missing.detail == "keys: /k cannot be read (on a, c)"
    assert missing.fix.startswith("put it on every node")


def test_keys_that_are_not_the_same_on_all_nodes_are_said_without_a_refusal(tmp_path: Path) -> None:
    seen = {}
    for node, text in (("a", "# one\n"), ("b", "# two\n"), ("c", "# one\n")):
        (tmp_path / "keys").write_text(text)
        seen[node] = inspect_node_files(with_keys(tmp_path / "keys"), FRONT)
    missing, differing = check_node_files(seen)
    assert (missing.status, differing.status) == (CheckStatus.PASS, CheckStatus.WARN)
    assert f"the key file {tmp_path / 'keys'} is one on a, c, another on b" in differing.detail
    for alike in check_node_files({"a": seen["a"], "c": seen["c"]}):
        assert alike.status is CheckStatus.PASS
