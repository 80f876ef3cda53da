"""Which cluster a request goes to, where one front has several.

Theory of operation. A front knows how far away each cluster is, its last reported wait, and the
requests that it has sent since; it knows no cache. Instead each *family* of requests (with the same
first blocks) has a home, by weighted rendezvous hashing. Fronts find the same home without
messages, and a change of clusters moves only its own families. A home is among the near clusters,
if any is reachable, so each region has one. A request goes where its first token is predicted
soonest,

    seconds = away_s + wait_s + (0 at home, else the time to compute the shared prefix),

so a family leaves home exactly when the wait there exceeds the value of its cache. An unreachable
cluster is not chosen while others are reachable.

Source: rendezvous hashing, Thaler and Ravishankar 1998; weights by -w / ln(u) (Schindelhauer and
Schomaker 2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

_BITS = 64


class ChoiceReason(StrEnum):
    """Why a cluster was chosen."""

    HOME = "home"
    OVERFLOWED = "overflowed"
    """Its home would have taken longer."""
    FAILED_OVER = "failed_over"
    """Its home is not heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A cluster as a front knows it."""

    name: str
    replicas: int
    """As last reported; larger clusters are home to more families."""
    round_trip_s: float = 0.0
    """There and back, from this front."""
    queue_wait_s: float = 0.0
    """Until a request that comes now begins: the last report, plus the requests sent since, less
    the time that has passed since."""
    is_unresponsive: bool = False
    """Its report is overdue."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(
                f"cluster {self.name}: got {self.replicas} replicas, expected 1 or more"
            )


class ClusterChoice(NamedTuple):
    """Where a request goes."""

    cluster: str
    reason: ChoiceReason
    home: str
    """Where it would go if all were equal."""


def choose_cluster(
    family: str,
    clusters: Sequence[ClusterView],
    *,
    prefix_prefill_s: float,
    max_home_round_trip_s: float = math.inf,
) -> ClusterChoice:
    """Where a request of this family goes.

    Args:
        family: a hash of its first blocks; with tenant and adapter where caches are apart.
        clusters: at least one.
        prefix_prefill_s: the time to compute the prefix that its family shares.
        max_home_round_trip_s: how far away its home may be, while there is a cluster within that.
    """
    home = home_cluster(family, _nearby(clusters, max_home_round_trip_s))
    responsive = [cluster for cluster in clusters if not cluster.is_unresponsive] or list(clusters)
    # Not to wherever it is empty now: all fronts have to agree on the next home, too.
    current_home = (
        home
        if home in responsive
        else home_cluster(family, _nearby(responsive, max_home_round_trip_s))
    )
    best = _fastest(responsive, current_home, prefix_prefill_s)
    if current_home is not home:
        return ClusterChoice(best.name, ChoiceReason.FAILED_OVER, home.name)
    return ClusterChoice(
        best.name, ChoiceReason.HOME if best is home else ChoiceReason.OVERFLOWED, home.name
    )


def _nearby(clusters: Sequence[ClusterView], max_round_trip_s: float) -> Sequence[ClusterView]:
    return [cluster for cluster in clusters if cluster.round_trip_s <= max_round_trip_s] or clusters


def home_cluster(family: str, clusters: Sequence[ClusterView]) -> ClusterView:
    """Where a family is at home; the same for every order of the clusters."""
    return max(clusters, key=lambda cluster: (_rendezvous_weight(family, cluster), cluster.name))


def _fastest(
    clusters: Sequence[ClusterView], home: ClusterView, prefix_prefill_s: float
) -> ClusterView:
    def seconds(one: ClusterView) -> tuple[float, bool, str]:
        away = one is not home
        return one.round_trip_s + one.queue_wait_s + prefix_prefill_s * away, away, one.name

    return min(clusters, key=seconds)


def _rendezvous_weight(family: str, cluster: ClusterView) -> float:
    digest = blake2b(f"{family}\0{cluster.name}".encode(), digest_size=_BITS // 8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2.0**_BITS
    return -cluster.replicas / math.log(uniform)
