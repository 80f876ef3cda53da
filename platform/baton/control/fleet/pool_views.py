"""One pool, as several coordinators see it and as the controller knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.demand import CoordinatorReport, PoolReport
from baton.domain.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The controller's knowledge of a pool."""

    role: Role
    """The role in which its replicas start."""
    starting: int = 0
    draining: int = 0
    running: int | None = None
    """Started, and without an order to stop; None: as coordinators see it."""
    gpus_per_replica: float = 1.0
    cold_start_s: float = 60.0
    """The expected time until a start was seen."""
    model: str = ""
    """As in its coordinators' reports; empty where there is only one."""


def best_pool_report(
    name: str, state: PoolState, reports: Sequence[CoordinatorReport]
) -> tuple[CoordinatorReport, PoolReport] | None:
    """The report with most of a pool's replicas, the freshest first; None without a report."""
    candidates = [
        (report, pool) for report in reports for pool in report.pools if pool.pool == name
    ]
    if not candidates:
        return None

    def mismatch(one: tuple[CoordinatorReport, PoolReport]) -> tuple[float, float, str]:
        report, pool = one
        known = active_replicas(pool)
        off = -known if state.running is None else abs(known - state.running)
        return (off, pool.oldest_report_age_s, report.coordinator_id)

    return min(candidates, key=mismatch)


def active_replicas(pool: PoolReport) -> int:
    """Those that take work."""
    return pool.prefill + pool.decode + pool.mixed


def active_by_role(pool_report: PoolReport, state: PoolState) -> dict[Role, int]:
    """Replicas that take work, by role; those with an order to stop are not among them."""
    roles = {
        Role.PREFILL: pool_report.prefill,
        Role.DECODE: pool_report.decode,
        Role.MIXED: pool_report.mixed,
    }
    if state.running is not None:
        excess = max(0, active_replicas(pool_report) - state.running)
        for role in (state.role, *roles):
            removed = min(excess, roles[role])
            roles[role] -= removed
            excess -= removed
    return roles


def best_capacities(
    name: str, reports: Sequence[CoordinatorReport], best: PoolReport
) -> PoolReport:
    """A pool's capacities by the believed report, or else by any other."""
    others = (pool for report in reports for pool in report.pools if pool.pool == name)
    measured = (
        other
        for other in (best, *others)
        if other.prefill_tokens_per_s and other.decode_tokens_per_s
    )
    return next(measured, best)
