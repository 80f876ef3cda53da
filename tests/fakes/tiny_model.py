"""The tiny model on disk."""

from __future__ import annotations

import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and transformers warn while they are imported
    from baton.engine.tiny_model import write_tiny_model


def tiny_model(folder: Path) -> Path:
    """Write the tiny model into a folder below `folder`, and return where it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return write_tiny_model(folder / "tiny")
