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


class Build(NamedTuple):
    """Versions, major and minor, that were tested together."""

    extra: str
    """Of baton's own, that installs them."""
    ray: str
    vllm: str
    nixl: str
    torch: str

    def of(self, package: str) -> str:
        """The version of one of `PACKAGES`."""
        version: str = getattr(self, package)
        return version


TESTED: Final = (
    Build(extra="cpu", ray="2.60", vllm="0.32", nixl="1.5", torch="2.13"),
    Build(extra="gpu", ray="2.60", vllm="0.33", nixl="1.5", torch="2.14"),
)
"""One row for each lock in `requirements/`; the tests run with each of them."""


def tested(package: str) -> tuple[str, ...]:
    """The versions of a package that were tested."""
    return tuple(dict.fromkeys(build.of(package) for build in TESTED))


def untested(
    versions: Mapping[str, str | None], packages: Sequence[str] = PACKAGES
) -> Iterator[tuple[str, str]]:
    """Packages whose version was not tested, or not with this vLLM, and what is wrong with it.

    Args:
        versions: Installed versions; None or absent: not installed.
        packages: Those to look at.
    """
    alone = set()
    for package in packages:
        version = versions.get(package)
        if version is not None and minor(version) not in tested(package):
            alone.add(package)
            yield package, f"{package}: got {version}, expected {' or '.join(tested(package))}"
    vllm, torch = versions.get("vllm"), versions.get("torch")
    if vllm is None or torch is None or alone & {"vllm", "torch"} or "torch" not in packages:
        return
    # A vLLM is compiled against one torch.
    built_with = {build.vllm: build.torch for build in TESTED}.get(minor(vllm))
    if built_with is not None and minor(torch) != built_with:
        yield "torch", f"torch: got {torch}, expected {built_with} with vllm {vllm}"


def refusals(
    versions: Mapping[str, str | None], packages: Sequence[str] = PACKAGES
) -> tuple[str, ...]:
    """What is said before a start with versions that were not tested; empty where all were."""
    do = (
        f"install baton[cpu] or baton[gpu] in a fresh environment, or start with {FLAG} ({KEY})"
        " and find out what else is different"
    )
    return tuple(f"{what}; {do}" for _, what in untested(versions, packages))


def minor(version: str) -> str:
    """Major and minor version."""
    return ".".join(version.split(".")[:2])


def is_before(version: str, since: tuple[int, int]) -> bool:
    """Whether a version is of a minor version before this one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < since
