"""Files that are read on other nodes: each says what it lacks before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.serving.preflight.autoscaling_capacity import NodeKind
from baton.serving.preflight.named_files import (
    Duties,
    FilesSeen,
    duties_of,
    file_findings,
    files_here,
)

SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"
HEAD = NodeKind(name="", resources={"node:__internal_head__": 1.0})
WORKER = NodeKind(name="", resources={"CPU": 4.0}, labels={"rack": "a"})
AT = "cluster.address=10.0.0.1:6379"
FRONT = Duties(ingress=True, controller=False, pools=())


def config(*sets: str) -> DeploymentConfig:
    return load_config([SIM], env={}, sets=(AT, *sets)).config


def with_keys(path: Path) -> DeploymentConfig:
    return config(f"tenants.acme.keys_file={path}")


def test_ingresses_are_on_the_head_or_where_there_are_cpus_and_engines_where_they_fit() -> None:
    hidden = config("pools.decode.placement.labels.rack=b")
    assert duties_of(hidden, HEAD) == Duties(ingress=True, controller=False, pools=())
    assert duties_of(hidden, WORKER) == Duties(ingress=False, controller=True, pools=("prefill",))
    shown = config("server.host=0.0.0.0", "pools.decode.resources.cpus=8")
    assert not duties_of(shown, HEAD).ingress
    assert duties_of(shown, WORKER) == Duties(ingress=True, controller=True, pools=("prefill",))


def test_a_key_file_counts_where_an_ingress_may_be_and_nowhere_else(tmp_path: Path) -> None:
    wanted = with_keys(tmp_path / "keys")
    (line,) = files_here(wanted, FRONT).missing
    assert f"{tmp_path / 'keys'}: cannot be read: No such file or directory" in line
    elsewhere = Duties(ingress=False, controller=True, pools=("prefill", "decode"))
    assert files_here(wanted, elsewhere) == FilesSeen()
    (tmp_path / "keys").write_text("")
    assert files_here(wanted, FRONT).missing == ()


def test_a_key_file_with_a_bad_line_is_refused_without_showing_the_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-secret\n")
    (line,) = files_here(with_keys(tmp_path / "keys"), FRONT).missing
    assert f"{tmp_path / 'keys'}:1" in line
    assert "sk-secret" not in line


@pytest.mark.parametrize(
    ("said", "duties"),
    [
        ("model.source=/no/such/model", Duties(ingress=False, controller=False, pools=("decode",))),
        ("model.source=/no/such/model", FRONT),
        ("model.adapters.law.source=/no/such/adapter",
         Duties(ingress=False, controller=False, pools=("decode",))),
        ("pools.decode.env.TOKEN={file: /no/such/file}",
         Duties(ingress=False, controller=False, pools=("decode",))),
        ("observability.token_file=/no/such/token",
         Duties(ingress=False, controller=True, pools=())),
    ],
)  # fmt: skip
def test_what_a_process_would_read_is_looked_for_where_it_may_be(said: str, duties: Duties) -> None:
    (line,) = files_here(config(said), duties).missing
    assert "/no/such/" in line
    nobody = Duties(ingress=False, controller=False, pools=())
    assert files_here(config(said), nobody).missing == ()


def test_what_several_nodes_lack_is_one_line_with_their_names() -> None:
    lacks, has = FilesSeen(missing=("keys: /k cannot be read",)), FilesSeen()
    (line,), _ = file_findings({"a": lacks, "b": has, "c": lacks})
    assert line.startswith("keys: /k cannot be read (on a, c); put it on every node")


def test_keys_that_are_not_the_same_on_all_nodes_are_said_without_a_refusal(tmp_path: Path) -> None:
    seen = {}
    for node, text in (("a", "# one\n"), ("b", "# two\n"), ("c", "# one\n")):
        (tmp_path / "keys").write_text(text)
        seen[node] = files_here(with_keys(tmp_path / "keys"), FRONT)
    missing, (line,) = file_findings(seen)
    assert missing == ()
    assert f"the key file {tmp_path / 'keys'} is one on a, c, another on b" in line
    assert file_findings({"a": seen["a"], "c": seen["c"]}) == ((), ())
