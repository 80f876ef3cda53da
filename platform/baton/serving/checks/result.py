"""Results of checks: a status, and problems with their remedies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_MIB = 1024**2
_GIB = 1024**3


class CheckStatus(StrEnum):
    """The result of a check."""

    PASS = "PASS"  # noqa: S105 - no password
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Finding(NamedTuple):
    """A problem and its remedy."""

    found: str
    fix: str

    @classmethod
    def from_line(cls, line: str) -> Finding:
        """The finding in a line `problem; remedy` of a component that has no checks."""
        found, _, fix = line.rpartition("; ")
        return cls(found, fix) if found else cls(line, "")

    def __str__(self) -> str:
        return f"{self.found}; {self.fix}" if self.fix else self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One checked item."""

    name: str
    status: CheckStatus
    why: str
    findings: tuple[Finding, ...]
    """Problems; without any, one finding with the state of the item."""

    @property
    def detail(self) -> str:
        """All problems; of a check without any, the state of the item."""
        return "; ".join(finding.found for finding in self.findings)

    @property
    def fix(self) -> str:
        """The remedy; empty if none is needed."""
        fixes = (finding.fix for finding in self.findings if finding.fix)
        return "; ".join(dict.fromkeys(fixes))


class Topic(NamedTuple):
    """Name and importance of a check, for all its possible results."""

    name: str
    why: str

    def passed(self, detail: str) -> Check:
        """The item is well."""
        return self._check(CheckStatus.PASS, Finding(detail, ""))

    def warned(self, detail: str, fix: str) -> Check:
        """The item works, but not as it should."""
        return self._check(CheckStatus.WARN, Finding(detail, fix))

    def failed(self, detail: str, fix: str) -> Check:
        """The item does not work."""
        return self._check(CheckStatus.FAIL, Finding(detail, fix))

    def skipped(self, detail: str) -> Check:
        """The item could not be checked, or need not be."""
        return self._check(CheckStatus.SKIP, Finding(detail, ""))

    def from_findings(
        self,
        findings: Iterable[Finding],
        *,
        otherwise: str = "",
        status: CheckStatus = CheckStatus.FAIL,
    ) -> Check:
        """This status with any findings; without one the item is well, and `otherwise` its text."""
        found = tuple(findings)
        return self._check(status, *found) if found else self.passed(otherwise)

    def _check(self, status: CheckStatus, *findings: Finding) -> Check:
        return Check(name=self.name, status=status, why=self.why, findings=findings)


@dataclass(frozen=True, slots=True)
class UnknownFact:
    """A fact that could not be found out."""

    reason: str
    is_late: bool = False
    """Whether it did not come by its deadline: the machine may only be busy."""


def last_line(text: str) -> str:
    """The last line with content: of a traceback, the exception that ended it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def lines_with(status: CheckStatus, checks: Iterable[Check]) -> tuple[str, ...]:
    """A line `problem; remedy` for each finding of the checks with this status."""
    return tuple(
        str(finding) for check in checks if check.status is status for finding in check.findings
    )


def size_text(size_bytes: int) -> str:
    """`2.0 GiB`, `64 MiB`."""
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes // _MIB} MiB"
