"""`baton upgrade` between two trees of one version whose code differs, while streams flow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.serving.versions import code_version, content_hash
from tests.chaos.other_version import copy_version
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.processes import descendants
from tests.fakes.scaled_deadline import slowdown

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
_OTHER_CODE = {"serving/shared/names.py": ('APP = "baton"\n', 'APP = "baton"\nOTHER = APP\n')}


def replicas(baton: Deployment) -> dict[int, str]:
    """The processes of all parts, by what they are."""
    found = {}
    for process in descendants(baton.process.pid):
        try:
            title = process.cmdline()[0]
        except (psutil.Error, IndexError):
            continue
        if title.startswith("ray::ServeReplica:baton:"):
            found[process.pid] = title.split(":")[4].split(".")[0]
    return found


def test_other_code_of_the_same_version_replaces_every_process_and_no_stream_fails(
    tmp_path: Path,
) -> None:
    other = copy_version(tmp_path / "other", edits=_OTHER_CODE)
    python = str(other.python(tmp_path / "env"))
    one = {"pools.prefill.replicas.initial": 1, "pools.decode.replicas.initial": 1}
    drain = {"admission.timeouts.drain": "4s"}
    with running_deployment("sim.yaml", tmp_path, **one, **drain) as baton:
        assert baton.status()["baton"] == code_version()
        assert baton.run_json("upgrade", timeout_s=60 * slowdown())["code"] is None
        before, over = replicas(baton), threading.Event()

        def keep_asking(number: int) -> int:
            asked = 0
            while not over.is_set():
                baton.stream(f"prompt {number} {asked}")
                asked += 1
            return asked

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(keep_asking, number) for number in range(2)]
            try:
                report = baton.run_json(
                    "upgrade", "--bake", "2s", timeout_s=400 * slowdown(), interpreter=python
                )
            finally:
                over.set()
            assert all(future.result(120 * slowdown()) > 0 for future in asking)
        new = f"{other.version}+{content_hash(other.source / 'baton')}"
        assert [item.partition(" ")[0] for item in report["code"]] == [code_version(), new]
        after = replicas(baton)
        assert not before.keys() & after.keys()
        assert sorted(before.values()) == sorted(after.values())
        assert baton.status()["baton"] == new


_AT_ZERO = {
    **{f"pools.{pool}.replicas.min": 0 for pool in ("prefill", "decode")},
    **{f"pools.{pool}.replicas.initial": 1 for pool in ("prefill", "decode")},
    "autoscaler.scale_to_zero": "true",
    "autoscaler.interval": "300ms",
    "autoscaler.scale_down.cooldown": "1s",
}


def is_at_zero(status: dict[str, Any]) -> bool:
    return all(pool["desired"] == pool["ready"] == 0 for pool in status["pools"])


def test_a_fleet_at_zero_takes_a_configuration_and_other_code_and_serves_with_them(
    tmp_path: Path,
) -> None:
    other = copy_version(tmp_path / "other", edits=_OTHER_CODE)
    python = str(other.python(tmp_path / "env"))
    with running_deployment("sim.yaml", tmp_path, **_AT_ZERO) as baton:
        baton.wait_for(is_at_zero, 60)
        change = ("--set", "model.engine.sim.decode_step=9ms", "--bake", "2s")
        baton.run_json("apply", *baton.options, *change, timeout_s=120 * slowdown())
        assert baton.wait_for(is_at_zero, 60)["generation"] == 1
        baton.stream("wake up")
        baton.wait_for(is_at_zero, 60)
        arguments = ("upgrade", "--bake", "2s")
        report = baton.run_json(*arguments, timeout_s=200 * slowdown(), interpreter=python)
        new = f"{other.version}+{content_hash(other.source / 'baton')}"
        assert report["code"][1].startswith(f"{new} ")
        assert baton.wait_for(is_at_zero, 60)["baton"] == new
        baton.stream("wake up again")
