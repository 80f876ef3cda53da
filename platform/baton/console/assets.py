"""The page's own files, read once; their address says what is in them, so they can be kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

_MEDIA_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of other kinds are not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file."""

    body: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """All files by their path below `static/`, and a tag that changes when any of them does.

    The tag is part of the path, not a parameter: so modules that import each other by relative
    paths get the same version of all.
    """

    tag: str
    by_path: Mapping[str, Asset]


def load_assets() -> Assets:
    """Read all of them, from wherever the package is."""
    by_path = dict(_collect(files("baton.console") / "static", ""))
    digest = hashlib.sha256()
    for path in sorted(by_path):
        digest.update(path.encode() + b"\0" + by_path[path].etag.encode())
    return Assets(tag=digest.hexdigest()[:12], by_path=by_path)


def page_template() -> str:
    """The page, as Jinja has it."""
    return (files("baton.console") / "templates" / "page.html").read_text(encoding="utf-8")


def _collect(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    assets: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            assets += _collect(entry, f"{path}/")
        elif (media_type := _MEDIA_TYPES.get(f".{entry.name.rpartition('.')[2]}")) is not None:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            assets.append((path, Asset(body=body, media_type=media_type, etag=etag)))
    return assets
