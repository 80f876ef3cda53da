"""Usage and cost by tenant: rows that add up to the whole cost of the replicas.

A tenant is charged the device-seconds of its requests, predicted from their computed tokens.
Predictions err, so where those of a pool exceed its actual computing time, they are scaled down to
it. The rest has rows of its own. `OVERHEAD` is computed for no tenant in particular: steps that
were shared better than predicted, discarded work, running requests. `IDLE` is paid for and not
used. Tokens and money are never rounded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.control.accounting.cluster_totals import PoolCapacity
from baton.domain.demand import GpuUsage, Tally

IDLE = "(idle)"
OVERHEAD = "(overhead)"
"""No tenants: names of tenants have no parentheses."""
NON_TENANTS = frozenset({IDLE, OVERHEAD})
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One tenant, or one part of the rest."""

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
    gpu_usage: Iterable[GpuUsage],
    pools: Mapping[str, PoolCapacity],
    price_per_hour: Mapping[str, float],
) -> tuple[UsageRow, ...]:
    """Tenants by name, then overhead, then idle time; `price_per_hour` is of a device, by pool.

    The device-seconds of all rows together are those of `pools`.
    """
    device_s_by_key = device_seconds(gpu_usage, pools)
    counts_by_tenant: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for row in tallies:
        ended_requests = row.evaluated + row.excluded + row.client_errors
        counts = (ended_requests, row.good, row.prompt_tokens, row.cached_tokens, row.output_tokens)
        counts_by_tenant[row.tenant] = [
            a + b for a, b in zip(counts_by_tenant[row.tenant], counts, strict=True)
        ]
    device_s_by_user: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (user, pool), device_s in device_s_by_key.items():
        device_s_by_user[user][pool] = device_s
    tenants = sorted((counts_by_tenant.keys() | device_s_by_user.keys()) - NON_TENANTS)
    rows = [
        _row(tenant, device_s_by_user[tenant], price_per_hour, counts_by_tenant[tenant])
        for tenant in tenants
    ]
    rows += [_row(user, device_s_by_user[user], price_per_hour) for user in (OVERHEAD, IDLE)]
    return tuple(rows)


def device_seconds(
    gpu_usage: Iterable[GpuUsage], pools: Mapping[str, PoolCapacity]
) -> Mapping[tuple[str, str], float]:
    """By tenant and pool; `OVERHEAD` and `IDLE` have the rest. Of a pool: its whole cost."""
    charged_s = _charged(gpu_usage, pools)
    charged_by_pool: defaultdict[str, float] = defaultdict(float)
    for (_, pool), device_s in charged_s.items():
        charged_by_pool[pool] += device_s
    for pool, capacity in pools.items():
        busy_s = max(charged_by_pool[pool], min(capacity.busy_s, capacity.device_s))
        charged_s[OVERHEAD, pool] = busy_s - charged_by_pool[pool]
        charged_s[IDLE, pool] = max(0.0, capacity.device_s - busy_s)
    return charged_s


def _charged(
    gpu_usage: Iterable[GpuUsage], pools: Mapping[str, PoolCapacity]
) -> dict[tuple[str, str], float]:
    """By tenant and pool, no more of any pool than it has computed."""
    predicted = {(row.tenant, row.pool): row.gpu_s for row in gpu_usage if row.pool in pools}
    totals: defaultdict[str, float] = defaultdict(float)
    for (_, pool), gpu_s in predicted.items():
        totals[pool] += gpu_s
    scales = {}
    for pool, total_s in totals.items():
        capacity = pools[pool]
        max_charge_s = min(capacity.busy_s or capacity.device_s, capacity.device_s)
        scales[pool] = min(1.0, max_charge_s / total_s) if total_s else 1.0
    return {key: gpu_s * scales[key[1]] for key, gpu_s in predicted.items()}


def _row(
    tenant: str,
    by_pool: Mapping[str, float],
    price_per_hour: Mapping[str, float],
    counts: Iterable[int] = (0, 0, 0, 0, 0),
) -> UsageRow:
    requests, good, prompt_tokens, cached_tokens, output_tokens = counts
    cost = sum(gpu_s / _HOUR_S * price_per_hour.get(pool, 0.0) for pool, gpu_s in by_pool.items())
    return UsageRow(
        tenant=tenant,
        requests=requests,
        good=good,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        device_s=sum(by_pool.values()),
        cost=cost if price_per_hour else None,
    )
