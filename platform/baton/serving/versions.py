"""The version of the running code, and the tested versions of the packages that it builds on.

baton uses vLLM's engine protocol and private parts of Ray Serve, so any other version may
break it. Untested versions start only on request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import baton

PACKAGES: Final = ("ray", "vllm", "nixl", "torch")
FLAG: Final = "--allow-untested-versions"
KEY: Final = "cluster.allow_untested_versions"
_CONSOLE: Final = "console"
"""The console's pages run, too; other files that are not Python serve commands only."""
_HASH_DIGITS: Final = 12


class VersionSet(NamedTuple):
    """Versions, major and minor, that were tested together."""

    extra: str
    ray: str
    vllm: str
    nixl: str
    torch: str

    def version_of(self, package: str) -> str:
        """The version of one of `PACKAGES`."""
        version: str = getattr(self, package)
        return version


TESTED: Final = (
    VersionSet(extra="cpu", ray="2.60", vllm="0.32", nixl="1.5", torch="2.13"),
    VersionSet(extra="gpu", ray="2.60", vllm="0.33", nixl="1.5", torch="2.14"),
)
"""One row for each lock in `requirements/`; the tests run with each of them."""


def versions_tested(package: str) -> tuple[str, ...]:
    """The versions of a package that were tested."""
    return tuple(dict.fromkeys(build.version_of(package) for build in TESTED))


def untested_packages(
    versions: Mapping[str, str | None], packages: Sequence[str] = PACKAGES
) -> Iterator[tuple[str, str]]:
    """Packages with an untested version, or untested with this vLLM, and the problem.

    A version that is None or absent is not installed.
    """
    reported = set()
    for package in packages:
        version = versions.get(package)
        if version is not None and minor_version(version) not in versions_tested(package):
            reported.add(package)
            yield (
                package,
                f"{package}: got {version}, expected {' or '.join(versions_tested(package))}",
            )
    vllm, torch = versions.get("vllm"), versions.get("torch")
    if vllm is None or torch is None or reported & {"vllm", "torch"} or "torch" not in packages:
        return
    # A vLLM is compiled against one torch.
    built_with = {build.vllm: build.torch for build in TESTED}.get(minor_version(vllm))
    if built_with is not None and minor_version(torch) != built_with:
        yield "torch", f"torch: got {torch}, expected {built_with} with vllm {vllm}"


def minor_version(version: str) -> str:
    """Major and minor version."""
    return ".".join(version.split(".")[:2])


def is_before(version: str, minimum: tuple[int, int]) -> bool:
    """Whether a version is of an earlier minor version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < minimum


@cache
def code_version() -> str:
    """A name such as `0.2.0+3f2a9c1b77d0`, which changes with any change of the code.

    It is read once: files that are replaced later are not what this process runs.
    """
    return f"{baton.__version__}+{content_hash(Path(baton.__file__).parent)}"


def content_hash(package: Path) -> str:
    """A hash of the package's files; the same wherever it is installed."""
    digest = sha256()
    for file in sorted(package.rglob("*")):
        relative = file.relative_to(package)
        is_included = file.suffix == ".py" or relative.parts[0] == _CONSOLE
        if is_included and "__pycache__" not in relative.parts and file.is_file():
            digest.update(
                f"{relative.as_posix()}\0{sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()[:_HASH_DIGITS]
