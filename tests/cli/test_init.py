"""`baton init`, and `baton up MODEL` without a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.backend import Backend
from baton.cli.main import build_app
from baton.config import LoadedConfig
from baton.config.load import load_text
from baton.domain.errors import BatonError

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Deployments:
    """Those that were started."""

    def __init__(self) -> None:
        self.started: list[LoadedConfig] = []

    def up(self, config: LoadedConfig, **_: object) -> Mapping[str, object]:
        self.started.append(config)
        return {"endpoint": "http://127.0.0.1:8000"}


def run(*words: object, deployments: Deployments | None = None) -> Result:
    backend = Backend(commands=lambda: deployments, environ=NO_GPU)  # type: ignore[arg-type,return-value]
    return CliRunner().invoke(build_app(), [*map(str, words)], obj=backend)


def test_a_configuration_is_printed_that_loads() -> None:
    done = run("init", "org/model", "--prefill", 2)
    assert done.exit_code == 0
    assert load_text(done.stdout).pools["prefill"].replicas.initial == 2


def test_it_is_written_to_a_new_file_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    assert run("init", "--write", path).exit_code == 0
    written = path.read_text()
    assert load_text(written).pools.keys() == {"prefill", "decode"}
    again = run("init", "org/model", "--write", path)
    assert again.exit_code == 1
    assert "got a file, expected none" in again.stderr
    assert path.read_text() == written


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "H100", 1),
        ("meta-llama/Llama-3.1-70B-Instruct", "h100", 4),
        ("meta-llama/Llama-3.1-70B-Instruct", "H200", 2),
    ],
)
def test_a_replica_has_the_gpus_that_the_model_needs(model: str, gpu: str, tp: int) -> None:
    done = run("init", model, "--gpu", gpu)
    assert done.exit_code == 0, done.stderr
    for pool in load_text(done.stdout).pools.values():
        assert (pool.parallel.tp, pool.resources.gpus) == (tp, tp)
        assert pool.resources.accelerator == gpu.upper()


def test_a_width_that_was_given_is_taken() -> None:
    done = run("init", "meta-llama/Llama-3.1-70B-Instruct", "--gpu", "H100", "--tp", 8)
    assert load_text(done.stdout).pools["decode"].parallel.tp == 8


def test_a_model_that_no_node_holds_is_refused() -> None:
    done = run("init", "deepseek-ai/DeepSeek-V3", "--gpu", "H100")
    assert done.exit_code == 1
    assert "do not fit 8 H100 GPUs" in done.stderr
    assert done.stdout == ""


def test_an_unknown_size_is_said() -> None:
    done = run("init", "org/unheard-of", "--gpu", "H100")
    assert "The model's size is not known here" in done.stdout


def test_an_unknown_gpu_is_refused() -> None:
    done = run("init", "tiny", "--gpu", "abacus")
    assert done.exit_code == 1
    assert "abacus" in done.stderr


def test_a_model_starts_without_a_file_and_its_derived_configuration_is_shown() -> None:
    deployments = Deployments()
    done = run("up", "tiny", "--decode", 2, deployments=deployments)
    assert done.exit_code == 0, done.output
    (loaded,) = deployments.started
    assert loaded.config.pools["decode"].replicas.initial == 2
    assert "  source: tiny" in done.stderr
    assert "source" not in done.stdout


def test_the_made_up_configuration_is_kept_where_it_is_asked(tmp_path: Path) -> None:
    path, deployments = tmp_path / "baton.yaml", Deployments()
    assert run("up", "tiny", "--write", path, deployments=deployments).exit_code == 0
    assert load_text(path.read_text()).pools == deployments.started[0].config.pools
    assert run("up", "tiny", "--write", path, deployments=deployments).exit_code == 1
    assert len(deployments.started) == 1


def test_keys_are_set_in_it_too() -> None:
    deployments = Deployments()
    run("up", "tiny", "--set", "server.port=8123", deployments=deployments)
    assert deployments.started[0].config.server.port == 8123


@pytest.mark.parametrize(
    "words",
    [("up",), ("up", "tiny", "-c", "x.yaml"), ("up", "-c", "x.yaml", "--tp", "2")],
    ids=" ".join,
)
def test_a_model_and_a_file_exclude_each_other(words: tuple[str, ...]) -> None:
    deployments = Deployments()
    assert run(*words, deployments=deployments).exit_code == 2
    assert deployments.started == []


class FailingStart(Deployments):
    """One that never comes to serve."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def up(self, config: LoadedConfig, **_: object) -> Mapping[str, object]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BatonError("the port went away"), 1),
        (ConnectionRefusedError("the store went away"), 3),
        (TimeoutError("the store does not answer"), 4),
    ],
)
def test_a_failed_start_does_not_point_to_the_status_of_a_stopped_deployment(
    error: Exception, code: int
) -> None:
    done = run("up", "tiny", deployments=FailingStart(error))
    assert done.exit_code == code
    *_, last = done.stderr.splitlines()
    assert last.startswith("next: correct the errors above and start again")
    assert "status" not in last
