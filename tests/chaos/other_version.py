"""Another version of baton beside the one that is tested: its tree with some lines changed.

A release that is good differs by its number alone; one that is bad, by the line that makes it so.
What is under test stays as it is.
"""

from __future__ import annotations

import shutil
import site
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import baton

_SOURCE = Path(baton.__file__).parent
_VERSION_LINE = f'__version__ = "{baton.__version__}"'

Edits = Mapping[str, tuple[str, str]]
"""By file below `baton/`: text that occurs there once, and what stands there instead."""

FAILS_TO_START: Edits = {
    "engine/sim/engine.py": (
        "        host, port = self._settings.side_channel_host, self._settings.side_channel_port\n",
        "        host, port = self._settings.side_channel_host, self._settings.side_channel_port\n"
        "        if self._settings.max_running_requests == 13:\n"
        '            raise EngineStartFailed("no engine starts with 13", "choose another")\n',
    )
}
"""An engine that does not start with `max_num_seqs: 13`, as real ones do not with some options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """A copy of baton's tree."""

    version: str
    source: Path
    """To be on a process' path before ours."""

    def python(self, folder: Path) -> Path:
        """An interpreter of its own in which this version is installed, with all that it needs."""
        venv.create(folder, with_pip=False, symlinks=True)
        library = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = folder / "lib" / library / "site-packages"
        lines = [str(self.source), *site.getsitepackages()]
        (packages / "other.pth").write_text("\n".join(lines) + "\n")
        return folder / "bin" / "python"


def copy_version(folder: Path, *, version: str = "", edits: Edits | None = None) -> OtherVersion:
    """Make one."""
    source = folder / "platform"
    shutil.copytree(_SOURCE, source / "baton", ignore=shutil.ignore_patterns("__pycache__"))
    changes = dict(edits or {})
    if version:
        changes["__init__.py"] = (_VERSION_LINE, f'__version__ = "{version}"')
    for name, (old, new) in changes.items():
        file = source / "baton" / name
        text = file.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}, expected it once"
        file.write_text(text.replace(old, new))
    return OtherVersion(version=version or baton.__version__, source=source)
