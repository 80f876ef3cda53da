"""Results of checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

_MIB = 1024**2
_GIB = 1024**3


class CheckStatus(StrEnum):
    """The result of a check."""

    PASS = "PASS"  # noqa: S105 - no password
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One checked item."""

    name: str
    status: CheckStatus
    detail: str
    why: str = ""
    fix: str = ""
    """The remedy; empty if none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Name and importance of a check, for all its possible results."""

    name: str
    why: str

    def passed(self, detail: str) -> Check:
        """The item is well."""
        return Check(name=self.name, status=CheckStatus.PASS, detail=detail, why=self.why)

    def warned(self, detail: str, fix: str) -> Check:
        """The item works, but not as it should."""
        return Check(name=self.name, status=CheckStatus.WARN, detail=detail, why=self.why, fix=fix)

    def failed(self, detail: str, fix: str) -> Check:
        """The item does not work."""
        return Check(name=self.name, status=CheckStatus.FAIL, detail=detail, why=self.why, fix=fix)

    def skipped(self, detail: str) -> Check:
        """The item could not be checked, or need not be."""
        return Check(name=self.name, status=CheckStatus.SKIP, detail=detail, why=self.why)

    def from_findings(self, findings: Sequence[str]) -> Check:
        """A failure; each finding has its remedy after a semicolon."""
        parts = [line.partition("; ") for line in findings]
        detail = "; ".join(part[0] for part in parts)
        fixes = "; ".join(dict.fromkeys(part[2] for part in parts if part[2]))
        return self.failed(detail, fixes or "correct the configuration")


def count_by_status(checks: Iterable[Check]) -> dict[CheckStatus, int]:
    """The number of checks with each status."""
    counts = dict.fromkeys(CheckStatus, 0)
    for check in checks:
        counts[check.status] += 1
    return counts


def size_text(size_bytes: int) -> str:
    """`2.0 GiB`, `64 MiB`."""
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes // _MIB} MiB"
