"""LoRA adapters that come and go while a whole baton serves, on Ray with simulated engines."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
import pytest

from baton.runtime.keys.api_keys import mint
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
INGRESSES = 2
MOST = 3


def write_adapter(folder: Path, rank: int = 8) -> Path:
    """What a simulated engine looks at of an adapter."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "bias": "none"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


class World:
    """A deployment, keys for it and a folder of adapters."""

    def __init__(self, baton: Deployment, folder: Path, keys: dict[str, str]) -> None:
        self.baton, self.folder, self.keys = baton, folder, keys

    def post(self, path: str, *, who: str | None = "ops", **body: object) -> httpx.Response:
        headers = {} if who is None else {"authorization": f"Bearer {self.keys[who]}"}
        return httpx.post(f"{self.baton.url}{path}", json=body, headers=headers, timeout=90)

    def load(self, name: str, folder: str = "sql") -> httpx.Response:
        path = str(self.folder / folder)
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def complete(self, model: str, prompt: str = "select") -> httpx.Response:
        asked = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        asked |= {"temperature": 0}
        return httpx.post(f"{self.baton.url}/v1/completions", json=asked, timeout=90)

    def text(self, model: str, prompt: str = "select") -> str:
        answer = self.complete(model, prompt)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        text: str = answer.json()["choices"][0]["text"]
        return text

    def listed(self) -> list[set[str]]:
        """What is listed, asked so often that every ingress answers."""
        answers = [httpx.get(f"{self.baton.url}/v1/models", timeout=30) for _ in range(12)]
        return [{row["id"] for row in answer.json()["data"]} for answer in answers]

    def kill(self, deployment: str) -> None:
        """End the processes of a deployment as a crash would; of the ingresses, one."""
        name = f"ray::ServeReplica:baton:{deployment}"
        found = [
            descendant
            for descendant in descendants(self.baton.process.pid)
            if descendant.status() != psutil.STATUS_ZOMBIE
            and " ".join(descendant.cmdline()).startswith(name)
        ]
        assert found, f"no process {name}"
        for process in found[:1] if deployment == "ingress" else found:
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    for name, rank in (("sql", 8), ("chat", 8), ("wide", 64)):
        write_adapter(folder / name, rank)
    keys, lines = {}, []
    for name in ("ops", "user"):
        key, keys[name] = mint("ops", now=datetime.now(UTC), is_admin=name == "ops")
        lines.append(key.format_line() + "\n")
    file = tmp_path_factory.mktemp("keys") / "ops.keys"
    file.write_text("".join(lines))
    file.chmod(0o600)
    settings = {
        "model.runtime_adapters.max": MOST,
        "model.runtime_adapters.paths": f"[{folder}]",
        "tenants.ops.keys_file": file,
        "tenants.default.anonymous": "true",
        "server.replicas.min": INGRESSES,
    }
    with running_deployment("sim.yaml", tmp_path_factory.mktemp("up"), **settings) as baton:
        yield World(baton, folder, keys)


def until(holds: Callable[[], object], within_s: float, baton: Deployment) -> None:
    """Wait until something holds; the ingress may just be replaced."""

    def holds_now(_status: object) -> bool:
        try:
            return bool(holds())
        except httpx.HTTPError:
            return False

    baton.wait_for(holds_now, within_s)


def test_only_an_administrating_key_loads_and_errors_are_explained(world: World) -> None:
    path = str(world.folder / "sql")
    for who, status in ((None, 401), ("user", 403)):
        asked = world.post("/v1/load_lora_adapter", who=who, lora_name="sql", lora_path=path)
        assert asked.status_code == status, asked.text
    for folder, status, reason in (
        ("none", 404, "no such folder"),
        ("wide", 400, "max_rank"),
        ("../up", 403, "runtime_adapters.paths"),
    ):
        refused = world.load("sql", folder)
        assert (refused.status_code, reason in refused.text) == (status, True), refused.text
    assert world.load("tiny").status_code == 400
    assert world.unload("sql").status_code == 404
    assert world.listed() == [{"tiny"}] * 12


def test_an_adapter_is_served_by_all_survives_and_drains(world: World) -> None:
    loaded = world.load("sql")
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert world.listed() == [{"tiny", "sql"}] * 12
    answer_text = world.text("sql")
    assert answer_text != world.text("tiny")
    again = world.load("sql")
    assert (again.status_code, "already been loaded" in again.text) == (400, True)

    for deployment in ("prefill", "decode", "controller", "ingress"):
        world.kill(deployment)
        until(lambda: world.complete("sql").status_code == 200, 200, world.baton)
        assert world.text("sql") == answer_text
    world.baton.wait_for(lambda status: len(status["ingresses"]) == INGRESSES, 200)
    until(lambda: world.listed() == [{"tiny", "sql"}] * 12, 60, world.baton)

    options = [*world.baton.options, "--set", "admission.max_queued_requests=77"]
    world.baton.run_json("apply", *options, timeout_s=120)
    assert world.text("sql") == answer_text
    until(lambda: world.load("chat", "chat").status_code in {200, 400}, 60, world.baton)
    assert world.text("chat") not in {answer_text, world.text("tiny")}

    drained_stream(world)


def drained_stream(world: World) -> None:
    """Unload while a stream runs: it ends undisturbed, and no other request finds the adapter."""
    begun, ended = threading.Event(), []

    def run() -> None:
        ended.append(
            world.baton.stream(
                "long", max_tokens=1500, model="chat", on_chunk=lambda _count: begun.set()
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    assert world.unload("chat").status_code == 200
    gone = world.complete("chat")
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
    (row,) = [row for row in world.baton.status()["adapters"] if row["name"] == "chat"]
    assert row["state"] == "draining"
    thread.join(90)
    assert len(ended) == 1
    world.baton.wait_for(lambda s: all(row["name"] != "chat" for row in s["adapters"]), 60)
    # Loaded again from elsewhere it is another adapter, even with blocks cached under its name.
    assert world.load("chat", "sql").status_code == 200
    assert not ended[0].startswith(world.text("chat", "long"))


def test_there_are_as_many_as_may_be(world: World) -> None:
    answers = [world.load(f"n{number}").status_code for number in range(MOST + 1)]
    assert answers[-1] == 400
    refused = world.load("more")
    assert "runtime_adapters.max" in refused.text
