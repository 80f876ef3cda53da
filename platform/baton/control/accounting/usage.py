"""Who used what, and what it cost: rows that add up to all that replicas have cost.

A tenant is charged the device-seconds that its requests took, as predicted from what was computed
for them. Predictions err, so where those of a pool exceed the time that it computed in truth, they
are scaled down to it. What is left has rows of its own: `OVERHEAD`, computed for nobody in
particular (steps that were shared better than predicted, work that was thrown away, requests under
way), and `IDLE`, paid for and not used. Tokens and money are never rounded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.control.accounting.cluster_totals import Held
from baton.domain.demand import Spent, Tally

IDLE = "(idle)"
OVERHEAD = "(overhead)"
"""No tenants: names of tenants have no parentheses."""
NOBODY = frozenset({IDLE, OVERHEAD})
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One tenant, or one part of what is left."""

    tenant: str
    requests: int = 0
    good: int = 0
    """Those that met every objective."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that need not be computed."""
    output_tokens: int = 0
    device_s: float = 0.0
    """GPU-seconds; of replicas on CPUs, their seconds."""
    cost: float | None = None
    """In the currency of the prices; None where there are none."""


def usage_rows(
    tallies: Iterable[Tally],
    spent: Iterable[Spent],
    pools: Mapping[str, Held],
    price_per_hour: Mapping[str, float],
) -> tuple[UsageRow, ...]:
    """Tenants by name, then overhead, then idle time; `price_per_hour` is of a device, by pool.

    The device-seconds of all rows together are those of `pools`.
    """
    used = device_seconds(spent, pools)
    requests: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for row in tallies:
        ended = row.judged + row.excused + row.barred
        figures = (ended, row.good, row.prompt_tokens, row.cached_tokens, row.output_tokens)
        requests[row.tenant] = [a + b for a, b in zip(requests[row.tenant], figures, strict=True)]
    by_user: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (user, pool), device_s in used.items():
        by_user[user][pool] = device_s
    tenants = sorted((requests.keys() | by_user.keys()) - NOBODY)
    rows = [_row(one, by_user[one], price_per_hour, requests[one]) for one in tenants]
    rows += [_row(one, by_user[one], price_per_hour) for one in (OVERHEAD, IDLE)]
    return tuple(rows)


def device_seconds(
    spent: Iterable[Spent], pools: Mapping[str, Held]
) -> Mapping[tuple[str, str], float]:
    """By tenant and pool; what is nobody's, under `OVERHEAD` and `IDLE`. Of a pool: all it cost."""
    used = _charged(spent, pools)
    taken: defaultdict[str, float] = defaultdict(float)
    for (_, pool), device_s in used.items():
        taken[pool] += device_s
    for pool, held in pools.items():
        busy_s = max(taken[pool], min(held.busy_s, held.device_s))
        used[OVERHEAD, pool] = busy_s - taken[pool]
        used[IDLE, pool] = max(0.0, held.device_s - busy_s)
    return used


def _charged(spent: Iterable[Spent], pools: Mapping[str, Held]) -> dict[tuple[str, str], float]:
    """By tenant and pool, no more of any pool than it has computed."""
    predicted = {(row.tenant, row.pool): row.gpu_s for row in spent if row.pool in pools}
    totals: defaultdict[str, float] = defaultdict(float)
    for (_, pool), gpu_s in predicted.items():
        totals[pool] += gpu_s
    scales = {}
    for pool, total_s in totals.items():
        held = pools[pool]
        at_most_s = min(held.busy_s or held.device_s, held.device_s)
        scales[pool] = min(1.0, at_most_s / total_s) if total_s else 1.0
    return {key: gpu_s * scales[key[1]] for key, gpu_s in predicted.items()}


def _row(
    tenant: str,
    by_pool: Mapping[str, float],
    price_per_hour: Mapping[str, float],
    figures: Iterable[int] = (0, 0, 0, 0, 0),
) -> UsageRow:
    requests, good, prompt, cached, output = figures
    cost = sum(gpu_s / _HOUR_S * price_per_hour.get(pool, 0.0) for pool, gpu_s in by_pool.items())
    return UsageRow(
        tenant=tenant,
        requests=requests,
        good=good,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        device_s=sum(by_pool.values()),
        cost=cost if price_per_hour else None,
    )
