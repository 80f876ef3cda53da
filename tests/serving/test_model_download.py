"""A model comes to a node before its engines start: once, with progress, or with a reason."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from baton.config import DeploymentConfig, load_config
from baton.domain.errors import EngineStartFailed
from baton.domain.names.model_sources import is_on_hub
from baton.engine.hub_fetch import FetchRequest
from baton.serving.checks.facts import hub_findings
from baton.serving.replica.model_download import fetch, fetch_for_engine, progress_text
from baton.serving.replica.start_reports import StartReporter
from tests.fakes.head_store import HeadStore
from tests.fakes.hub import REPOSITORY, Hub, HubBehavior, serve_hub
from tests.fakes.scaled_deadline import ScaledDeadline
from tests.repo.project import ROOT

_WEIGHTS = "model.safetensors"
FILES = {"config.json": b"{}", _WEIGHTS: b"w" * 24_000_000}
ORDER = FetchRequest(repository=REPOSITORY, revision=None, needs_weights=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub(FILES) as found:
        yield found


def config(source: str) -> DeploymentConfig:
    return load_config(
        [ROOT / "configs" / "quickstart.yaml"], env={}, sets=[f"model.source={source}"]
    ).config


def seen(hub: Hub, folder: Path) -> dict[str, str]:
    hold_on = {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    return {"HF_HOME": str(folder), "HF_ENDPOINT": hub.url, **hold_on}


def doing(store: HeadStore) -> list[str]:
    return [json.loads(data)["what"] for data in [*store.values.values()] if b"what" in data]


def halves(folder: Path) -> list[Path]:
    return [*folder.rglob("*.incomplete")]


async def until_said(store: HeadStore, words: str) -> None:
    deadline = ScaledDeadline(60)
    while not any(words in what for what in doing(store)):
        assert not deadline.is_expired(), store.values
        await asyncio.sleep(0.05)


def test_folders_stores_and_the_tiny_model_are_on_no_hub() -> None:
    here = ("tiny", "s3://bucket/m", "/models/m")
    assert [is_on_hub(source) for source in here] == [False] * 3
    assert is_on_hub("org/m")
    assert is_on_hub("hf://org/m")


def test_amounts_are_in_a_unit_that_fits() -> None:
    assert progress_text(3_100_000_000, 16_100_000_000) == "3.1 of 16.1 GB"
    assert progress_text(0, 2_000_000) == "0.0 of 2.0 MB"


def test_a_start_waits_for_a_hub_without_an_answer_until_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (finding,) = hub_findings(config(REPOSITORY), {"HF_ENDPOINT": url}, timeout_s=0.2)
    assert finding.found.startswith(f"{url} cannot be reached for model {REPOSITORY}: its hub")
    assert "HF_HUB_OFFLINE=1" in finding.fix


def test_a_hub_of_this_machine_is_asked_past_the_proxy(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert hub_findings(config(REPOSITORY), {"HF_ENDPOINT": hub.url}, timeout_s=60.0) == ()
    assert "127.0.0.1" in os.environ["NO_PROXY"]


def test_no_hub_is_asked_for_local_models_or_those_of_other_nodes() -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert hub_findings(config("tiny"), nowhere) == ()
    assert hub_findings(config(REPOSITORY), nowhere | {"HF_HUB_OFFLINE": "1"}) == ()
    elsewhere = config(REPOSITORY)
    cluster = replace(elsewhere.cluster, address="10.0.0.7:6379")
    assert hub_findings(replace(elsewhere, cluster=cluster), nowhere) == ()


@pytest.mark.slow
async def test_replicas_of_a_node_share_a_download_and_say_how_far_it_is(
    hub: Hub, tmp_path: Path
) -> None:
    release = Event()
    hub.behavior = HubBehavior(stalled={_WEIGHTS: release})
    store, told = HeadStore(), config(REPOSITORY)
    async with asyncio.TaskGroup() as group:
        for pool in ("prefill", "decode"):
            say = StartReporter(pool, "n", store)
            group.create_task(fetch_for_engine(told, pool, seen(hub, tmp_path), say))
        await asyncio.to_thread(hub.has_stalled.wait)
        await until_said(store, f"downloading {REPOSITORY}: 10.5 of 24.0 MB")
        release.set()
    assert hub.downloads == {"config.json": 1, _WEIGHTS: 1}
    assert store.values == {}


@pytest.mark.slow
async def test_a_failed_download_is_reported_to_every_waiter(hub: Hub, tmp_path: Path) -> None:
    hub.behavior = HubBehavior(gated=True)
    store = HeadStore()
    with pytest.raises(EngineStartFailed, match="is gated") as failed:
        await fetch(ORDER, seen(hub, tmp_path), StartReporter("decode", "n", store), deadline_s=60)
    assert "accept its licence" in failed.value.remedy
    (data,) = store.values.values()
    assert json.loads(data)["reason"] == failed.value.reason


@pytest.mark.slow
async def test_a_late_download_is_given_up_and_leaves_no_partial_files(
    hub: Hub, tmp_path: Path
) -> None:
    hub.behavior = HubBehavior(stalled={_WEIGHTS: Event()})
    say = StartReporter("decode", "n", HeadStore())
    waiting = asyncio.create_task(fetch(ORDER, seen(hub, tmp_path), say, deadline_s=3600))
    await asyncio.to_thread(hub.has_stalled.wait)
    assert halves(tmp_path)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not halves(tmp_path)
    with pytest.raises(EngineStartFailed, match="had not come after 0 s"):
        await fetch(ORDER, seen(hub, tmp_path), say, deadline_s=0.01)


@pytest.mark.parametrize("source", ["tiny", "/models/m"])
async def test_a_local_model_contacts_no_hub(source: str) -> None:
    nowhere: Mapping[str, str] = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    say = StartReporter("decode", "n", HeadStore())
    await fetch_for_engine(config(source), "decode", nowhere, say)
