"""Replicas that ended by themselves: Ray's table of actors, and what processes leave behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ray._private.state import GlobalState
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from ray.core.generated.gcs_pb2 import ActorTableData, GcsNodeInfo

from baton.serving.controller.deployment import RecentLosses
from baton.serving.ray.membership import (
    DeadActor,
    ReplicaLoss,
    kernel_killed_pids,
    local_last_words,
    lost_nodes,
    replica_losses,
)

UNEXPECTED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker"
    " exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
)
"""Of Ray 2.60, after SIGKILL and after SIGSEGV."""
INTENDED = UNEXPECTED.replace("SYSTEM_ERROR", "INTENDED_SYSTEM_EXIT")


class Clock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def actor(
    name: str = "decode#abc",
    *,
    reason: str = "WORKER_DIED",
    said: str = UNEXPECTED,
    at_s: float = 9,
    pid: int = 41,
    node_id: bytes = b"",
) -> DeadActor:
    """A dead replica as Ray's own code reads it from its table."""
    died = ActorDiedErrorContext(error_message=said, reason=getattr(ActorDiedErrorContext, reason))
    data = ActorTableData(
        name=f"SERVE_REPLICA::app#{name}",
        pid=pid,
        state=ActorTableData.ActorState.DEAD,
        end_time=round(at_s * 1000),
        death_cause=ActorDeathCause(actor_died_error_context=died),
    )
    data.address.ip_address = "10.0.0.1"
    data.address.node_id = node_id
    row: DeadActor = GlobalState()._gen_actor_info(data)
    return row


def losses(*actors: DeadActor, words: str = "") -> tuple[ReplicaLoss, ...]:
    return replica_losses(
        actors, app="app", pools=("decode",), last_words=lambda _pid, _node: words
    )


def test_a_replica_that_was_killed_is_a_loss_with_its_process() -> None:
    (loss,) = losses(actor())
    assert (loss.replica_id, loss.node, loss.pid, loss.ended_at_s) == (
        "decode-abc",
        "10.0.0.1",
        41,
        9.0,
    )
    assert "SIGKILL" in loss.how


def test_an_ordered_end_and_an_actor_of_no_pool_are_no_losses() -> None:
    told = (actor(reason="RAY_KILL"), actor(said=INTENDED), actor("controller#abc"))
    assert losses(*told) == ()


@pytest.mark.parametrize(
    ("row", "how"),
    [
        (actor(reason="NODE_DIED"), "its node was lost"),
        (
            actor(said="Worker exit type: SYSTEM_ERROR ... exits with an exit code 3."),
            "exit code 3",
        ),
    ],
)
def test_the_end_that_ray_knows_is_reported(row: DeadActor, how: str) -> None:
    (loss,) = losses(row, words="something else")
    assert loss.how == how


def test_a_replica_that_had_not_started_on_a_lost_node_is_no_loss() -> None:
    assert losses(actor(reason="NODE_DIED", pid=0)) == ()


DEAD, ALIVE = bytes.fromhex("36654b5a0ab3"), bytes.fromhex("304459878044")


def node(
    node_id: bytes, address: str, *, ended_at_s: float = 0.0, reason: str = "UNEXPECTED_TERMINATION"
) -> GcsNodeInfo:
    row = GcsNodeInfo(
        node_id=node_id, node_manager_address=address, end_time_ms=round(ended_at_s * 1000)
    )
    if ended_at_s:
        row.death_info.reason = getattr(type(row.death_info), reason)
        row.death_info.reason_message = "health check failed due to missing too many heartbeats"
    return row


RECORDED_ACTORS = (
    actor("prefill#8xi71s8m", reason="NODE_DIED", at_s=1037.759, pid=0, node_id=DEAD),
    actor("decode#n2j4ox5k", reason="RAY_KILL", at_s=1027.979, pid=16624, node_id=DEAD),
    actor("controller#ydx7q6yj", reason="RAY_KILL", at_s=1030.08, pid=16682, node_id=DEAD),
    actor("decode#old", reason="RAY_KILL", at_s=900.0, pid=16000, node_id=DEAD),
    actor("decode#elsewhere", at_s=1030.0, node_id=ALIVE),
)
"""Of Ray 2.60 whose raylet was killed at 1023 s: Serve ended what ran there, and started anew."""


def test_a_lost_node_is_told_with_the_replicas_that_it_ran_until_then() -> None:
    table = [node(ALIVE, "10.0.0.1"), node(DEAD, "10.0.0.2", ended_at_s=1037.755)]
    (lost,) = lost_nodes(table, RECORDED_ACTORS, app="app")
    assert (lost.node_id, lost.address, lost.ended_at_s) == (DEAD.hex(), "10.0.0.2", 1037.755)
    assert lost.replicas == ("controller-ydx7q6yj", "decode-n2j4ox5k")
    assert lost.reason == "health check failed due to missing too many heartbeats"


@pytest.mark.parametrize("reason", ["EXPECTED_TERMINATION", "AUTOSCALER_DRAIN_IDLE"])
def test_a_node_that_was_stopped_or_has_come_back_is_not_lost(reason: str) -> None:
    stopped = node(DEAD, "10.0.0.2", ended_at_s=9.0, reason=reason)
    assert lost_nodes([stopped], (), app="app") == ()
    back = [node(DEAD, "10.0.0.2", ended_at_s=9.0), node(ALIVE, "10.0.0.2")]
    assert lost_nodes(back, (), app="app") == ()
    preempted = node(DEAD, "10.0.0.2", ended_at_s=9.0, reason="AUTOSCALER_DRAIN_PREEMPTED")
    assert len(lost_nodes([preempted], (), app="app")) == 1


def test_the_newest_losses_come_first_and_old_ones_are_dropped() -> None:
    rows = [actor(f"decode#{at_s}", at_s=at_s) for at_s in range(40)]
    found = losses(*rows)
    assert [loss.replica_id for loss in found][:2] == ["decode-39", "decode-38"]
    assert len(found) == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("info\n*** SIGSEGV received at time=1 on cpu 1 ***\nPC: @ 0x1\n", "SIGSEGV"),
        ("Fatal Python error: Aborted\n", "Aborted"),
        ("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out\n", "OutOfMemoryError: CUDA out"),
        ('{"level": "info"}\n', ""),
        ('{"level": "warning", "reason": "ValueError: it served on"}\n', ""),
        ("09:11:44 WARNING config_rejected reason=ValueError: it served on\n", ""),
        ("ValueError: it served on\n" + "09:12:05 INFO request_ended\n" * 5, ""),
    ],
)
def test_the_last_words_of_a_process_are_its_signal_or_its_last_error(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "worker-ab-01-41.err").write_text(text)
    last_words = local_last_words(tmp_path, "10.0.0.1")
    assert last_words(41, "10.0.0.1") == words
    assert last_words(41, "10.0.0.2") == ""


def test_the_kernel_names_the_processes_that_it_killed(tmp_path: Path) -> None:
    messages = tmp_path / "kmsg"
    messages.write_text("3,1,2,-;Out of memory: Killed process 41 (ray::Serve) total-vm:1kB\n")
    assert kernel_killed_pids(messages) == {41}
    assert kernel_killed_pids(tmp_path / "none") == frozenset()


async def test_a_store_that_does_not_answer_costs_the_status_no_loss_and_one_thread() -> None:
    clock, answers, asked = Clock(), threading.Event(), 0

    def find() -> tuple[ReplicaLoss, ...]:
        nonlocal asked
        asked += 1
        if asked == 2:
            answers.wait(30)
        return losses(actor())

    recent = RecentLosses(find, clock=clock, wall_now_s=lambda: 12.0, timeout_s=0.05)
    assert [row["age_s"] for row in await recent.rows()] == [3.0]
    clock.at_s += 60
    assert len(await recent.rows()) == 1
    clock.at_s += 60
    assert len(await recent.rows()) == 1
    answers.set()
    assert asked == 2
