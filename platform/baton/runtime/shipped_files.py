"""Files of the project's root that an installed package carries: examples and dashboards."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import baton

_PACKAGE: Final = Path(baton.__file__).parent


def shipped_folder(name: str) -> Path:
    """The folder `name` of the project's root, as `configs`.

    A wheel carries it in `baton/shipped` (pyproject.toml), a checkout has it beside `platform`.
    """
    shipped = _PACKAGE / "shipped"
    root = shipped if shipped.is_dir() else _PACKAGE.parents[1]
    return root / name
