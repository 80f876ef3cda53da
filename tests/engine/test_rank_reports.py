"""What workers say of their pulls: gathered through vLLM, and understood or passed over."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.engine_reports import (
    TRANSPORTS_CALL,
    parse_rank_reports,
    query_ranks,
    read_rank_report,
)
from baton.runtime.rank_transports import Locality, RankTransports
from baton.transfer.peers import transport_environment
from tests.fakes.ucx_lines import transport_choice, write_log, zero_copy


class Core:
    """Says what it is told to."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.called: list[str] = []

    async def call_utility_async(self, method: str, *args: object) -> object:
        assert not args
        self.called.append(method)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_worker_reports_its_rank_its_node_and_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in transport_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_log(tmp_path, transport_choice(zero_copy("cma/memory")), f"ucx.h.{os.getpid()}")
    rank, node, found = read_rank_report(3)
    assert (rank, found) == (3, {"intra-node": ["cma"]})
    assert node
    monkeypatch.delenv("UCX_LOG_FILE")
    assert read_rank_report(3)[2] is None


def test_reports_of_workers_come_through() -> None:
    assert parse_rank_reports([[0, "a", {"inter-node": ["tcp"]}], [1, "b", None]]) == (
        RankTransports(rank=0, node="a", transports={Locality.OTHER_NODE: frozenset({"tcp"})}),
        RankTransports(rank=1, node="b", transports=None),
    )


@pytest.mark.parametrize(
    "answer", [None, 3, [[0, "a"]], [[0, "a", {"elsewhere": ["tcp"]}]], RuntimeError("it is dead")]
)
async def test_an_invalid_answer_is_none(answer: object) -> None:
    core = Core(answer)
    assert await query_ranks(core) == ()
    assert core.called == [TRANSPORTS_CALL]


def test_workers_of_this_vllm_learn_to_answer() -> None:
    assert table.RANK_REPORTS.install()
    from vllm.v1.worker.worker_base import WorkerBase

    assert hasattr(WorkerBase, TRANSPORTS_CALL)


def worker_config(backend: str | None) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))


@pytest.mark.parametrize(("backend", "chosen"), [("ray", [3]), ("mp", []), (None, [])])
def test_a_worker_of_rays_chooses_the_card_of_its_gpu_as_vllms_own_do(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, chosen: list[int]
) -> None:
    from baton.engine.vllm.patches import connector

    asked: list[int] = []
    monkeypatch.setattr(connector, "get_world_group", lambda: SimpleNamespace(local_rank=3))
    monkeypatch.setattr(connector, "set_worker_net_device", lambda rank, _: asked.append(rank))
    connector.set_worker_nic(worker_config(backend))
    assert asked == chosen


def test_vllm_knows_the_variables_that_give_each_gpu_its_card() -> None:
    import vllm.envs

    for name in ("VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_NIC_SELECTION_VARS"):
        assert name in vllm.envs.environment_variables
