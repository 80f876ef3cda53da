"""What is built of this tree, and environments in which it is installed as its users install it."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fakes.scaled_deadline import slowdown
from tests.repo.project import ROOT

_TIMEOUT_S = 120.0


class Installed(NamedTuple):
    """An environment with baton, an empty folder to run it in, and nothing of this tree."""

    program: Path
    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run `baton` with these words."""
        return subprocess.run(
            [str(self.program), *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s * slowdown(),
            check=False,
        )


def build(tree: Path, folder: Path, *targets: str) -> Sequence[Path]:
    """Build an sdist, a wheel or both of a tree."""
    options = [word for target in targets for word in ("-t", target)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *options, "-d", str(folder)],
        cwd=tree,
        env=_environment(),
        capture_output=True,
        check=True,
        timeout=_TIMEOUT_S * slowdown(),
    )
    return sorted(folder.iterdir())


def unpack(sdist: Path, folder: Path) -> Path:
    """The tree of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip, with what it says."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S * slowdown(),
        check=False,
    )


def install(wheel: Path, folder: Path, *, with_engines: bool) -> Installed:
    """Install a wheel into an environment of its own.

    Without engines it is empty but for what the wheel itself asks for. With engines, the packages
    of this environment are there, too, without its installation of this tree: they are gigabytes.
    """
    environment, empty, runtime = (folder / name for name in ("environment", "empty", "runtime"))
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    options: Sequence[str] = ("--quiet",)
    if with_engines:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        # Python reads no .pth files there, so an editable installation stays unseen.
        (packages / "engines.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        options = ("--quiet", "--no-deps", "--no-index")
    done = pip("--python", str(python), "install", *options, str(wheel))
    assert done.returncode == 0, done.stderr
    empty.mkdir()
    runtime.mkdir(mode=0o700)
    return Installed(
        program=environment / "bin" / "baton",
        folder=empty,
        environment={**_environment(), "XDG_RUNTIME_DIR": str(runtime), "NO_COLOR": "1"},
    )


def _environment() -> dict[str, str]:
    """This process' environment without this tree on Python's path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
