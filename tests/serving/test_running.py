"""Whether replicas can be replaced where the cluster is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.serving.running import cramped, fits, wants

BASE = (
    "version: 1\nmodel: {source: tiny, max_len: 4096}\n"
    "pools:\n  p: {role: prefill, resources: {cpus: 2, gpus: 1}}\n"
    "  d: {role: decode, resources: {cpus: 2, gpus: 1, memory: 8GiB}}\n"
)
Make = Callable[..., DeploymentConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def _make(*sets: str) -> DeploymentConfig:
        file = tmp_path / "x.yaml"
        file.write_text(BASE)
        return load_config([file], sets=sets).config

    return _make


def test_a_replica_fits_where_nothing_that_it_takes_is_lacking(make: Make) -> None:
    pool = make().pools["d"]
    taken = wants(pool)
    assert taken == {"CPU": 2, "GPU": 1, "memory": 8 * 1024**3}
    assert fits(pool, free=taken)
    for name, amount in taken.items():
        assert not fits(pool, free=taken | {name: amount - 0.5})
        assert not fits(pool, free={one: n for one, n in taken.items() if one != name})


def test_a_pool_without_gpus_needs_none(make: Make) -> None:
    assert fits(make("pools.p.resources.gpus=0").pools["p"], free={"CPU": 2})


def test_a_lone_replica_that_decodes_is_not_replaced_where_no_other_fits(make: Make) -> None:
    config = make("pools.d.engine.max_num_seqs=9")
    (why,) = cramped(config, make(), {"p": 1, "d": 1}, ["p", "d"])
    assert why.startswith("pool d has one replica")
    assert cramped(config, make(), {"p": 1, "d": 2}, ["p", "d"]) == []


def test_replicas_that_take_more_than_before_need_room_beside(make: Make) -> None:
    more, less = make("pools.d.resources.cpus=3"), make("pools.d.resources.cpus=1")
    (why,) = cramped(more, make(), {"p": 2, "d": 2}, ["d"])
    assert why.startswith("pool d asks for more than before")
    assert cramped(less, make(), {"p": 2, "d": 2}, ["d"]) == []
    assert cramped(more, make(), {"p": 2, "d": 2}, []) == []
