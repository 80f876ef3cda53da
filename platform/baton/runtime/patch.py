"""Couplings to private names of a vendor's package, each with a guard that checks the package.

Theory of operation: a `Patch` is one row of a table (`engine.vllm.patches.table`,
`serving.ray.couplings`, `transfer.couplings`). `fits` runs its guard on signatures, source or trial
objects of the installed package. If the guard finds a difference, a required row raises; any other
row is turned off, and a log event names the fallback. Only attributes that exist are replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import EngineStartFailed
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)


class MissingAttribute(AttributeError):
    """An object lacks an attribute that a patch replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Private names of one package."""

    package: str
    names: tuple[str, ...]
    tested: tuple[str, ...]
    """Versions, major and minor, in which these names were tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One coupling to private names; see the module."""

    name: str
    target: Target
    guard: Callable[[], str | None]
    """Returns why the installed package does not fit, or None."""
    fallback: str
    """The behaviour without the patch."""
    apply: Callable[..., object] | None = None
    """Installs it, idempotently; None: baton only calls or reads the names."""
    is_required: bool = False
    """Whether baton refuses to run without it."""

    def find_incompatibility(self) -> str | None:
        """Why the installed package does not fit; None where it does."""
        try:
            return self.guard()
        except Exception as error:  # noqa: BLE001 - a package of another version raises anything
            return f"{type(error).__name__}: {error}"

    def fits(self) -> bool:
        """Whether the installed package fits; logs an event if not.

        Raises:
            EngineStartFailed: it does not fit, and is required.
        """
        return self._report(self.find_incompatibility())

    def install(self, *arguments: Any, **values: Any) -> bool:  # noqa: ANN401 - a vendor's objects
        """Apply the row if it fits; whether it is applied.

        Raises:
            EngineStartFailed: it does not fit, and is required.
        """
        if not self.fits():
            return False
        assert self.apply is not None, "a row that is only called has nothing to install"
        try:
            self.apply(*arguments, **values)
        except MissingAttribute as error:
            return self._report(str(error))
        return True

    def _report(self, reason: str | None) -> bool:
        if reason is None:
            return True
        versions = f"{self.target.package} {' or '.join(self.target.tested)}"
        if self.is_required:
            raise EngineStartFailed(
                f"{self.name}: got {reason}, expected the private names of {versions}",
                f"install {versions}; {self.fallback}",
            )
        fields = {
            "patch": self.name,
            "reason": reason,
            "expected": versions,
            "fallback": self.fallback,
        }
        log_event(logger, logging.WARNING, "patch_turned_off", fields)
        return False


def replace_attributes(owner: object, **values: object) -> None:
    """Assign attributes that exist.

    Raises:
        MissingAttribute: `owner` lacks one of them; none is assigned then.
    """
    _check_present(owner, values)
    for name, value in values.items():
        setattr(owner, name, value)


def wrap_attribute(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of `owner` with a wrapper of it.

    Raises:
        MissingAttribute: `owner` has no such function.
    """
    _check_present(owner, (name,))
    setattr(owner, name, wrap(getattr(owner, name)))


def _check_present(owner: object, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        label = getattr(owner, "__name__", type(owner).__name__)
        raise MissingAttribute(f"{label} without {', '.join(missing)}")


def coupling_report(patches: Iterable[Patch]) -> list[dict[str, object]]:
    """How each row of a table fits, in plain values."""
    return [
        {
            "name": patch.name,
            "package": patch.target.package,
            "problem": patch.find_incompatibility(),
            "fallback": patch.fallback,
            "is_required": patch.is_required,
        }
        for patch in patches
    ]
