"""One pool, as several coordinators see it and as whoever starts its replicas knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.demand import CoordinatorReport, PoolReport
from baton.domain.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What is known of a pool by whoever starts and stops its replicas."""

    role: Role
    """What its replicas start as."""
    starting: int = 0
    draining: int = 0
    running: int | None = None
    """Started, and not told to stop; None: as coordinators see it."""
    gpus_per_replica: float = 1.0
    cold_start_s: float = 60.0
    """What to expect until a start was seen."""
    model: str = ""
    """As in its coordinators' reports; empty where there is only one."""


def most_telling(
    name: str, state: PoolState, sane: Sequence[CoordinatorReport]
) -> tuple[CoordinatorReport, PoolReport] | None:
    """Who knows most of a pool's replicas, the freshest first; None when nobody knows it."""
    found = [(report, pool) for report in sane for pool in report.pools if pool.pool == name]
    if not found:
        return None

    def doubt(one: tuple[CoordinatorReport, PoolReport]) -> tuple[float, float, str]:
        report, pool = one
        known = replicas(pool)
        off = -known if state.running is None else abs(known - state.running)
        return (off, pool.stale_s, report.coordinator_id)

    return min(found, key=doubt)


def replicas(pool: PoolReport) -> int:
    """Those that take work."""
    return pool.prefill + pool.decode + pool.mixed


def working(found: PoolReport, state: PoolState) -> dict[Role, int]:
    """Replicas that take work, by role; those that were told to stop are not among them."""
    roles = {Role.PREFILL: found.prefill, Role.DECODE: found.decode, Role.MIXED: found.mixed}
    if state.running is not None:
        excess = max(0, replicas(found) - state.running)
        for role in (state.role, *roles):
            taken = min(excess, roles[role])
            roles[role] -= taken
            excess -= taken
    return roles


def capacities(name: str, sane: Sequence[CoordinatorReport], best: PoolReport) -> PoolReport:
    """A pool's capacities as the one that is believed has them, or else as any other does."""
    told = (pool for report in sane for pool in report.pools if pool.pool == name)
    known = (one for one in (best, *told) if one.prefill_tokens_per_s and one.decode_tokens_per_s)
    return next(known, best)
