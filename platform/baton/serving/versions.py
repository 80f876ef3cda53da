"""Versions of the packages that baton builds on, and which of them it was tested with.

baton speaks vLLM's engine protocol and uses parts of Ray Serve that are not public: another version
is another program. So what nobody has tried does not start, unless somebody says that it shall.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

PACKAGES: Final = ("ray", "vllm", "nixl", "torch")
FLAG: Final = "--allow-untested-versions"
KEY: Final = "cluster.allow_untested_versions"


class VersionSet(NamedTuple):
    """Versions, major and minor, that were tested together."""

    extra: str
    """Of baton's own, that installs them."""
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
    """Packages whose version was not tested, or not with this vLLM, and what is wrong with it.

    Args:
        versions: Installed versions; None or absent: not installed.
        packages: Those to look at.
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


def version_errors(
    versions: Mapping[str, str | None], packages: Sequence[str] = PACKAGES
) -> tuple[str, ...]:
    """What is said before a start with versions that were not tested; empty where all were."""
    remedy = (
        f"install baton[cpu] or baton[gpu] in a fresh environment, or start with {FLAG} ({KEY})"
        " and find out what else is different"
    )
    return tuple(f"{error}; {remedy}" for _, error in untested_packages(versions, packages))


def minor_version(version: str) -> str:
    """Major and minor version."""
    return ".".join(version.split(".")[:2])


def is_before(version: str, minimum: tuple[int, int]) -> bool:
    """Whether a version is of a minor version before this one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < minimum
