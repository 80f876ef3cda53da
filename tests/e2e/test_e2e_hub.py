"""A model of a hub that stands on this machine: it comes once, by the token of the shell alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.engine.tiny_model import write_tiny_model
from tests.e2e.deployments import CONFIGS, running_deployment
from tests.e2e.ray_nodes import two_nodes
from tests.fakes.free_ports import free_port
from tests.fakes.hub import REPOSITORY, TOKEN, Hub, HubBehavior, folder_files, serve_hub
from tests.fakes.scaled_deadline import slowdown

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
_WEIGHTS = "model.safetensors"
_PROXY = {"HTTP_PROXY": "http://127.0.0.1:9"}
"""There is none: any call that needs a node would fail."""
_RAY = Path(sys.executable).with_name("ray")
_OPTIONS = (
    *("-c", str(CONFIGS / "sim.yaml"), "--set", f"model.source={REPOSITORY}"),
    *("--set", "observability.metrics.port=0"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return folder_files(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@contextmanager
def gated(files: dict[str, bytes], folder: Path, token: str | None) -> Iterator[Hub]:
    """A hub that wants a token, of which a shell knows; nothing is on this machine yet."""
    with serve_hub(files) as hub, pytest.MonkeyPatch.context() as shell:
        hub.behavior = HubBehavior(gated=True)
        shell.setenv("HF_ENDPOINT", hub.url)
        shell.setenv("HF_HOME", str(folder / "models"))
        if token is None:
            shell.delenv("HF_TOKEN", raising=False)
        else:
            shell.setenv("HF_TOKEN", token)
        yield hub


@pytest.mark.real
def test_real_engines_read_a_model_that_came_once(files: dict[str, bytes], tmp_path: Path) -> None:
    with (
        gated(files, tmp_path, TOKEN) as hub,
        running_deployment("quickstart.yaml", tmp_path, **{"model.source": REPOSITORY}) as baton,
    ):
        baton.stream("pass the baton on", model="small")
        assert hub.downloads[_WEIGHTS] == 1
        assert "Traceback" not in baton.log.read_text()


def test_a_model_that_may_not_be_had_ends_the_start_with_a_line(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    with gated(files, tmp_path, None) as hub:
        done = _up(os.environ | _PROXY, "--set", f"server.port={free_port()}")
    assert done.returncode != 0
    assert f"model {REPOSITORY} is gated: {hub.url} answered 401" in done.stderr
    assert f"accept its licence at {hub.url}/{REPOSITORY} and set HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_nodes_of_another_cluster_have_the_token_and_show_it_nowhere(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    with two_nodes() as nodes, gated(files, tmp_path, TOKEN) as hub:
        variables = ("HF_ENDPOINT", "HF_TOKEN")
        shell = {**nodes.environment, **{name: os.environ[name] for name in variables}, **_PROXY}
        shell["RAY_ADDRESS"] = nodes.address
        kept = f"cluster.model_cache.path={tmp_path / 'on every node'}"
        done = _up(shell, "--set", f"server.port={free_port()}", "--set", kept)
        assert done.returncode == 0, done.stderr
        assert hub.downloads["config.json"] == 1
        assert TOKEN in hub.tokens
        shown = [
            _says(shell, sys.executable, "-m", "baton.cli.main", "status", "-o", "json"),
            _says(shell, sys.executable, "-m", "baton.cli.main", "config", "show", *_OPTIONS),
            _says(
                nodes.environment,
                str(_RAY),
                "list",
                "actors",
                "--detail",
                "--address",
                nodes.dashboard,
            ),
            _says(
                nodes.environment,
                str(_RAY),
                "list",
                "runtime-envs",
                "--detail",
                "--address",
                nodes.dashboard,
            ),
            *(path.read_text(errors="replace") for path in _logs(shell)),
        ]
        assert [text for text in shown if TOKEN in text] == []
        _says(shell, sys.executable, "-m", "baton.cli.main", "down", "--timeout", "90s")


def _up(environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "baton.cli.main", "up", *_OPTIONS, *more]
    return subprocess.run(
        words,
        env=environment | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=400 * slowdown(),
        check=False,
    )


def _says(environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _logs(shell: dict[str, str]) -> list[Path]:
    folder = Path(shell["RAY_AUTH_TOKEN_PATH"]).parent / "r"
    found = [path for path in folder.rglob("logs/**/*") if path.is_file()]
    assert found
    return found
