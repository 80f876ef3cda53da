"""Configurations of deployments."""

from __future__ import annotations

from pathlib import Path

from baton.config import DeploymentConfig, load_config
from tests.repo.project import ROOT

CONFIGS = ROOT / "configs"
SMALL = (
    "version: 1\n"
    "model: {source: tiny, engine: {block_size: 16, kv_cache: 1GiB}}\n"
    "pools:\n"
    "  prefill: {role: prefill}\n"
    "  decode: {role: decode}\n"
)


def example(name: str, *sets: str) -> DeploymentConfig:
    """One of `configs/`, with settings of its own."""
    return load_config([CONFIGS / name], env={}, sets=sets).config


def simulated(*sets: str) -> DeploymentConfig:
    """That of simulated engines."""
    return example("sim.yaml", *sets)


def written(folder: Path, text: str, *sets: str) -> DeploymentConfig:
    """One that stands in a file below `folder`."""
    path = folder / "baton.yaml"
    path.write_text(text)
    return load_config([path], env={}, sets=sets).config
