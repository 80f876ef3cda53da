"""The artefacts of an example, rendered once."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.manifests.export import Target
from tests.deploy.rendered import export


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every form of one example, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("example")
    for target in Target:
        export("gpu-example", target, folder / target)
    return folder
