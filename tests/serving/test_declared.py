"""What Ray Serve is given when it builds the application, and what is kept of it."""

from __future__ import annotations

import pytest

from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import plain
from baton.domain.errors import ConfigInvalid
from baton.serving.app_builder import begin, config_of
from baton.serving.application.builds import decoded
from baton.serving.store.config_store import BUILT, Fate, Generations
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
    assert config_of({"config": plain(config)}) == config


@pytest.mark.parametrize("arguments", [{}, {"config": "a.yaml"}, {"config": {}, "more": 1}])
def test_other_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid, match="wanted 'config', a mapping of its keys"):
        config_of(arguments)


def test_a_configuration_with_a_misspelt_key_is_refused(config: DeploymentConfig) -> None:
    with pytest.raises(ConfigInvalid, match="rotuer"):
        config_of({"config": plain(config) | {"rotuer": {}}})


def test_the_first_configuration_is_generation_0(config: DeploymentConfig) -> None:
    store = HeadStore()
    begin(config, store)
    (kept,) = Generations(store).history()
    assert (kept.generation, kept.fate) == (0, Fate.STARTED)
    assert decoded(store.kept[f"note/{BUILT}"]).marks.keys() == {"decode", "ingress", "controller"}


def test_building_it_again_changes_nothing(config: DeploymentConfig) -> None:
    store = HeadStore()
    begin(config, store)
    before = dict(store.kept)
    begin(config, store)
    assert store.kept == before


def test_another_configuration_is_the_next_generation(config: DeploymentConfig) -> None:
    store = HeadStore()
    begin(config, store)
    begin(load_text(OTHER), store)
    newest = Generations(store).newest(config)
    assert (newest.generation, newest.config) == (1, load_text(OTHER))
    assert Generations(store).history()[-1].fate is Fate.APPLIED


def test_what_was_applied_by_hand_is_overruled_by_what_is_declared(
    config: DeploymentConfig,
) -> None:
    store = HeadStore()
    begin(config, store)
    begin(load_text(OTHER), store)
    begin(config, store)
    assert Generations(store).newest(load_text(OTHER)).config == config
    assert Generations(store).number() == 2


def test_link_keys_and_notes_of_what_runs_are_kept(config: DeploymentConfig) -> None:
    store = HeadStore()
    begin(config, store)
    store.put("link-keys", b"secret", overwrite=True)
    begin(load_text(OTHER), store)
    assert store.kept["link-keys"] == b"secret"
