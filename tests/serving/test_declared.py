"""What Ray Serve is given when it builds the application, and what is kept of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import baton
from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import to_plain
from baton.domain.errors import ConfigInvalid
from baton.serving.app_builder import commit_config, config_of
from baton.serving.application.builds import decode_build_record
from baton.serving.store.config_store import BUILD_RECORD_KEY, Generations, GenerationStatus
from baton.serving.versions import code_version, content_hash
from tests.fakes.head_store import HeadStore

TEXT = """
version: 1
model: {source: tiny, max_len: 64, engine: {kind: sim, sim: {}}}
pools: {decode: {role: mixed}}
"""
OTHER = TEXT.replace("role: mixed", "role: mixed, replicas: {min: 1, max: 3}")


@pytest.fixture
def config() -> DeploymentConfig:
    return load_text(TEXT)


def test_the_configuration_comes_as_an_argument(config: DeploymentConfig) -> None:
    assert config_of({"config": to_plain(config)}) == config


@pytest.mark.parametrize("arguments", [{}, {"config": "a.yaml"}, {"config": {}, "more": 1}])
def test_other_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid, match="expected 'config', a mapping of its keys"):
        config_of(arguments)


def test_a_configuration_with_a_misspelt_key_is_refused(config: DeploymentConfig) -> None:
    with pytest.raises(ConfigInvalid, match="rotuer"):
        config_of({"config": to_plain(config) | {"rotuer": {}}})


def test_the_first_configuration_is_generation_0(config: DeploymentConfig) -> None:
    store = HeadStore()
    commit_config(config, store)
    (kept,) = Generations(store).history()
    assert (kept.generation, kept.status) == (0, GenerationStatus.STARTED)
    assert decode_build_record(store.values[f"note/{BUILD_RECORD_KEY}"]).build_refs.keys() == {
        "decode",
        "ingress",
        "controller",
    }


def test_building_it_again_changes_nothing(config: DeploymentConfig) -> None:
    store = HeadStore()
    commit_config(config, store)
    before = dict(store.values)
    commit_config(config, store)
    assert store.values == before


def test_another_configuration_is_the_next_generation(config: DeploymentConfig) -> None:
    store = HeadStore()
    commit_config(config, store)
    commit_config(load_text(OTHER), store)
    newest = Generations(store).newest(config)
    assert (newest.generation, newest.config) == (1, load_text(OTHER))
    assert Generations(store).history()[-1].status is GenerationStatus.APPLIED


def test_a_declared_configuration_overrides_a_manual_apply(
    config: DeploymentConfig,
) -> None:
    store = HeadStore()
    commit_config(config, store)
    commit_config(load_text(OTHER), store)
    commit_config(config, store)
    assert Generations(store).newest(load_text(OTHER)).config == config
    assert Generations(store).newest_number() == 2


def test_link_keys_and_notes_of_running_deployments_are_kept(config: DeploymentConfig) -> None:
    store = HeadStore()
    commit_config(config, store)
    store.put("link-keys", b"secret", overwrite=True)
    commit_config(load_text(OTHER), store)
    assert store.values["link-keys"] == b"secret"


# -------------------------------------------------------------------- the name of the code


OURS = Path(baton.__file__).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OURS, tmp_path / "elsewhere" / "baton"))


def test_its_name_is_the_version_and_content_of_the_running_code() -> None:
    assert code_version() == f"{baton.__version__}+{content_hash(OURS)}"


def test_a_copy_elsewhere_is_the_same_code(copy: Path) -> None:
    assert content_hash(copy) == content_hash(OURS)


def test_files_of_python_and_packagers_are_no_part_of_it(copy: Path) -> None:
    (copy / "serving" / "__pycache__").mkdir(exist_ok=True)
    (copy / "serving" / "__pycache__" / "app.cpython-311.pyc").write_bytes(b"x")
    (copy / "telemetry" / "dashboards" / "files").mkdir(parents=True, exist_ok=True)
    (copy / "telemetry" / "dashboards" / "files" / "goodput.json").write_text("{}")
    assert content_hash(copy) == content_hash(OURS)


@pytest.mark.parametrize(
    "file", ["serving/shared/names.py", "console/static/app.js", "__init__.py"]
)
def test_one_line_more_is_other_code(copy: Path, file: str) -> None:
    with (copy / file).open("a") as more:
        more.write("// or #\n")
    assert content_hash(copy) != content_hash(OURS)


def test_a_file_that_goes_or_is_called_otherwise_is_other_code(copy: Path) -> None:
    (copy / "serving/shared/names.py").rename(copy / "serving/shared/other_names.py")
    moved = content_hash(copy)
    (copy / "serving/shared/other_names.py").unlink()
    assert len({moved, content_hash(copy), content_hash(OURS)}) == 3
