"""The artefacts kept in `deploy/`; `python -m tests.deploy.rendered --write` renders them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from baton.config.load import load_config
from baton.manifests.export import Target, manifest_files
from baton.manifests.settings import ManifestSettings
from tests.repo.project import ROOT

FOLDER: Final = ROOT / "deploy"
EXAMPLES: Final = tuple(sorted(path.stem for path in (ROOT / "configs").glob("*-example.yaml")))
COMMITTED: Final[Mapping[str, tuple[Target, ...]]] = {
    name: tuple(Target) if name == "gpu-example" else (Target.KUBERAY,) for name in EXAMPLES
}
"""Every form of one example, and one form of the others."""
_COPIED_PREFIX: Final = "dashboards/"
"""What an export copies from the project's own folder is not kept twice."""


def render(example: str, target: Target) -> Mapping[str, bytes]:
    """The files of one form of one example."""
    loaded = load_config([ROOT / "configs" / f"{example}.yaml"])
    return manifest_files(target, loaded, ManifestSettings())


def export(example: str, target: Target, folder: Path) -> Path:
    """The same, written; returns the folder."""
    for name, content in render(example, target).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@cache
def render_committed() -> dict[str, bytes]:
    """Every file that is to be in `deploy/`, by path."""
    return {
        f"{example}/{target}/{name}": content
        for example, targets in COMMITTED.items()
        for target in targets
        for name, content in render(example, target).items()
        if not name.startswith(_COPIED_PREFIX)
    }


def stray_files() -> list[str]:
    """Files below `deploy/` that nobody renders; its own pages are not among them."""
    existing = (path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file())
    expected = render_committed().keys()
    return sorted(
        str(path) for path in existing if str(path) not in expected and path.suffix != ".md"
    )


def main() -> None:
    """Write what is to be kept, and remove what is not."""
    for name in stray_files():
        (FOLDER / name).unlink()
    for name, content in render_committed().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.deploy.rendered --write")
    main()
