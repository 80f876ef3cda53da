"""The program that fetches a model, at a hub on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from baton.engine.hub_fetch import FetchRequest, access_failure, downloaded_bytes
from tests.fakes.hub import COMMIT_SHA, REPOSITORY, TOKEN, Hub, HubBehavior, serve_hub
from tests.fakes.scaled_deadline import ScaledDeadline

pytestmark = pytest.mark.slow
_SHARDS = ("model-1.safetensors", "model-2.safetensors")
FILES = {
    "config.json": b"{}",
    "README.md": b"not read",
    "other.bin": b"not read",
    # The client writes 10 MiB at a time.
    _SHARDS[0]: b"1" * 1_000_000,
    _SHARDS[1]: b"2" * 24_000_000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {str(at): name for at, name in enumerate(_SHARDS)}}
    ).encode(),
}
_READ = set(FILES) - {"README.md", "other.bin"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub(FILES) as found:
        yield found


class Node:
    """Where the program is run."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.snapshot = folder / "hub" / "models--org--small" / "snapshots" / COMMIT_SHA
        self.report = folder / "report"

    @contextmanager
    def runs(
        self, environment: Mapping[str, str] | None = None, **order: object
    ) -> Iterator[subprocess.Popen[bytes]]:
        told: Any = {"repository": REPOSITORY, "revision": None, "needs_weights": True, **order}
        seen = {
            "HF_HOME": str(self.folder),
            "HF_ENDPOINT": self.hub.url,
            "HF_HUB_DOWNLOAD_TIMEOUT": "600",
            **(environment or {}),
        }
        words = [sys.executable, "-m", "baton.engine.hub_fetch"]
        with subprocess.Popen(
            [*words, FetchRequest(**told, report_file=str(self.report)).to_json()],
            env={**os.environ, **seen},
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def fetches(self, environment: Mapping[str, str] | None = None, **order: object) -> list[str]:
        """Why it did not come, and what to do; empty where it came."""
        with self.runs(environment, **order) as process:
            assert process.wait() == 0
        said = json.loads(self.report.read_text())
        assert said["ended"]
        return said["trouble"] or []


@pytest.fixture
def node(hub: Hub, tmp_path: Path) -> Node:
    return Node(hub, tmp_path)


def test_the_files_that_vllm_reads_come_once_and_suffice_without_a_hub(node: Node) -> None:
    assert node.fetches() == []
    assert {path.name for path in node.snapshot.iterdir()} == _READ
    assert node.fetches() == []
    assert set(node.hub.downloads.values()) == {1}
    assert node.fetches({"HF_HUB_OFFLINE": "1"}) == []
    node.hub.behavior = HubBehavior(status=503)
    assert node.fetches() == []


def test_an_api_server_gets_no_weights(node: Node) -> None:
    assert node.fetches(needs_weights=False) == []
    assert {path.name for path in node.snapshot.iterdir()} == _READ - set(_SHARDS)


def test_weights_go_where_the_engine_looks_for_them(node: Node) -> None:
    assert node.fetches(folder=str(node.folder / "elsewhere")) == []
    assert not node.snapshot.exists()
    assert len([*(node.folder / "elsewhere").glob("*/snapshots/*/*.safetensors")]) == 2


def test_a_download_that_is_cut_goes_on(node: Node) -> None:
    node.hub.behavior = HubBehavior(truncated_once=frozenset(_SHARDS[:1]))
    assert node.fetches() == []
    assert (node.snapshot / _SHARDS[0]).read_bytes() == FILES[_SHARDS[0]]
    assert node.hub.downloads[_SHARDS[0]] == 2


def test_a_gated_model_comes_by_the_token_alone(node: Node) -> None:
    node.hub.behavior = HubBehavior(gated=True)
    reason, remedy = node.fetches()
    assert reason == f"model org/small is gated: {node.hub.url} answered 401"
    assert remedy.startswith(f"accept its licence at {node.hub.url}/org/small and set HF_TOKEN")
    reason, remedy = node.fetches({"HF_TOKEN": "hf_of_another"})
    assert "answered 403" in reason
    assert "with the account of HF_TOKEN" in remedy
    assert node.fetches({"HF_TOKEN": TOKEN}) == []


def test_a_missing_model_is_one_line(node: Node) -> None:
    why, remedy = node.fetches(repository="org/none")
    assert why == f"{node.hub.url} shows no model org/none: it answered 404"
    assert remedy == (
        "correct the spelling of its name (models.*.source), or set HF_TOKEN where it is private"
    )
    node.hub.behavior = HubBehavior(private=True)
    assert node.fetches()[0] == f"{node.hub.url} shows no model org/small: it answered 401"
    node.hub.behavior = HubBehavior()
    assert node.fetches(revision="v9") == [
        f"model org/small has no revision 'v9' on {node.hub.url}",
        "correct models.*.revision",
    ]
    reason, remedy = node.fetches({"HF_HUB_OFFLINE": "1", "HF_HOME": str(node.folder / "empty")})
    assert "HF_HUB_OFFLINE is set" in reason
    assert remedy.startswith("fetch it there with 'hf download'")


def test_a_start_learns_before_it_begins_what_the_hub_refuses(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    seen = {"HF_ENDPOINT": hub.url}

    def failure(repository: str = REPOSITORY, revision: str | None = None) -> str:
        return str(access_failure(repository, revision, seen, folder=tmp_path))

    assert failure() == "None"
    assert "shows no model org/none: it answered 404" in failure("org/none")
    assert "correct the spelling of its name" in failure("org/none")
    assert "has no revision 'v9'" in failure(revision="v9")
    hub.behavior = HubBehavior(gated=True)
    assert "is gated: " in failure()
    assert f"accept its licence at {hub.url}/org/small and set HF_TOKEN" in failure()
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    seen["HF_TOKEN"] = "hf_of_another"  # noqa: S105 - of nobody
    assert "with the account of HF_TOKEN" in failure()
    hub.behavior = HubBehavior(status=403)
    assert "see whether HF_TOKEN is valid and may read it" in failure()
    hub.behavior = HubBehavior(status=503)
    assert "answered 503" in failure()
    seen["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert "http://127.0.0.1:9 cannot be reached for model org/small: ConnectError" in failure()


def test_a_model_that_is_here_starts_without_the_hub(node: Node) -> None:
    assert node.fetches() == []
    cache = node.folder / "hub"
    seen = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert access_failure(REPOSITORY, None, seen, folder=cache) is None
    assert access_failure("org/other", None, seen, folder=cache) is not None


def test_a_hub_that_does_not_answer_is_said_at_once(node: Node) -> None:
    reason, remedy = node.fetches({"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert reason.startswith(
        "http://127.0.0.1:9 cannot be reached for model org/small: ConnectError"
    )
    assert "HF_ENDPOINT for a mirror" in remedy


def test_headers_of_a_mirror_are_not_shown(node: Node) -> None:
    word = "-".join(("my", "password"))
    reason, _ = node.fetches({"HF_ENDPOINT": f"http://me:{word}@127.0.0.1:9"})
    assert reason.startswith("http://127.0.0.1:9 cannot be reached")
    assert word not in node.report.read_text()


def test_a_model_goes_through_a_proxy_that_is_named(node: Node) -> None:
    # The hub of this machine stands in for a proxy before another one, of which only it knows.
    assert node.fetches({"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": node.hub.url}) == []
    assert node.hub.downloads[_SHARDS[0]] == 1


def test_progress_is_shown_and_partial_files_are_removed(node: Node) -> None:
    node.hub.behavior = HubBehavior(stalled={_SHARDS[1]: Event()})
    blobs = node.snapshot.parents[1] / "blobs"
    total = sum(len(FILES[name]) for name in _SHARDS)
    blobs.mkdir(parents=True)
    (blobs / "old.1234abcd.incomplete").write_bytes(b"of one that was killed")
    os.utime(blobs / "old.1234abcd.incomplete", (0, 0))
    with node.runs() as process:
        deadline = ScaledDeadline(60)
        while _read_report(node.report).get("done", 0) <= len(FILES[_SHARDS[0]]):
            assert not deadline.is_expired(), _read_report(node.report)
            time.sleep(0.05)
        said = _read_report(node.report)
        assert said["total"] == total
        assert said["done"] < total
        assert len([*blobs.glob("*.incomplete")]) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert [*blobs.glob("*.incomplete")] == []


def test_files_that_are_whole_and_files_on_their_way_are_counted(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "s", tmp_path / "b"
    snapshot.mkdir()
    blobs.mkdir()
    sizes = {"a": 8192, "b": 16384}
    assert downloaded_bytes(snapshot, blobs, sizes) == 0
    (snapshot / "a").write_bytes(bytes(8192))
    (blobs / "b.1.incomplete").write_bytes(b"x" * 4096)
    assert downloaded_bytes(snapshot, blobs, sizes) == 8192 + 4096
    os.utime(blobs / "b.1.incomplete", (0, 0))  # of a program that was killed
    assert downloaded_bytes(snapshot, blobs, sizes) == 8192


def _read_report(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return found
