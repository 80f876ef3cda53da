"""Writing configurations and loading them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from baton.config import LoadedConfig, load_config
from baton.config.language.renamed_keys import RENAMED_KEYS, RenamedKey
from baton.domain.errors import ConfigInvalid

MINIMAL_CONFIG = "version: 1\nmodel: {source: tiny, max_len: 4096}\npools: {main: {role: mixed}}\n"
"""The least that can be deployed."""


class Load(Protocol):
    """Loads texts as files x0.yaml, x1.yaml and so on."""

    def __call__(
        self,
        *texts: str,
        env: Mapping[str, str] | None = None,
        sets: Sequence[str] = (),
        renamed: Sequence[RenamedKey] = RENAMED_KEYS,
    ) -> LoadedConfig: ...


Refuse = Callable[..., tuple[str, ...]]
"""Loads what cannot be loaded; returns the findings."""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def _load(
        *texts: str,
        env: Mapping[str, str] | None = None,
        sets: Sequence[str] = (),
        renamed: Sequence[RenamedKey] = RENAMED_KEYS,
    ) -> LoadedConfig:
        files = [Path(f"x{index}.yaml") for index in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        return load_config(files, env=env, sets=sets, renamed=renamed)

    return _load


@pytest.fixture
def load_invalid(load: Load) -> Refuse:
    def _refuse(
        *texts: str,
        env: Mapping[str, str] | None = None,
        sets: Sequence[str] = (),
        renamed: Sequence[RenamedKey] = RENAMED_KEYS,
    ) -> tuple[str, ...]:
        with pytest.raises(ConfigInvalid) as error:
            load(*texts, env=env, sets=sets, renamed=renamed)
        return error.value.problems

    return _refuse
