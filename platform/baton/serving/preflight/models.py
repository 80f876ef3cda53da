"""Models that cannot be read from where a configuration says that they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from baton.config.schema.deployment import ModelConfig
from baton.domain.names.model_sources import TINY, is_in_object_store, is_path

_STREAMER_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
"""Extras of the package that streams weights, by scheme."""


def source_findings(models: Mapping[str, ModelConfig]) -> tuple[str, ...]:
    """Models that are named by a path where there is none. Hub ids are not looked up."""
    findings = []
    for name, model in models.items():
        source = model.source
        path = Path(source).expanduser()
        if is_in_object_store(source):
            findings += _streamer_findings(name, source)
        if source == TINY or path.is_dir() or not is_path(source):
            continue
        problem = "is not a directory" if path.exists() else "does not exist"
        findings.append(
            f"models.{name}.source: {source} {problem}; "
            "give the directory of a model, or its id on the hub"
        )
    return tuple(findings)


def _streamer_findings(model: str, source: str) -> list[str]:
    """Stores of objects are read by a package that vLLM does not bring."""
    if importlib.util.find_spec("runai_model_streamer") is not None:
        return []
    store = source.partition("://")[0]
    return [
        f"models.{model}.source: {source} is read by a package that is not installed;"
        f" pip install 'runai-model-streamer[{_STREAMER_EXTRAS[store.lower()]}]' on every node"
    ]
