"""Which cluster a request goes to, where one front has several.

Theory of operation. Between clusters nothing is exact: a front knows of each how far away it is,
how long requests waited there when it last told, and what the front itself has sent since. It knows
no cache. Instead each *family* of requests (those with the same first blocks) has a home, by
weighted rendezvous hashing: fronts find the same one without asking anybody, larger clusters are
home to more families, and when a cluster comes or goes only its own families move. A home is among
the clusters that are near, where any is heard of, so that each region has one of its own. A request
goes where its first token is predicted soonest,

    seconds = away_s + wait_s + (0 at home, else what computing the shared prefix takes),

so a family leaves home exactly when the wait there exceeds what its cache is worth, and comes back
when it does not. A cluster that is not heard of any more is nobody's choice while others are.

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


class Why(StrEnum):
    """Why a cluster was chosen."""

    HOME = "home"
    SPILLED = "spilled"
    """Its home would have taken longer."""
    FAILED_OVER = "failed_over"
    """Its home is not heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A cluster as a front knows it."""

    name: str
    replicas: int
    """As it last told; larger ones are home to more families."""
    away_s: float = 0.0
    """There and back, from this front."""
    wait_s: float = 0.0
    """Until a request that comes now begins: as last told, and what this front has sent since, less
    the time that has passed since."""
    silent: bool = False
    """It should have told by now."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"cluster {self.name}: got {self.replicas} replicas, wanted 1 or more")


class Choice(NamedTuple):
    """Where a request goes."""

    cluster: str
    why: Why
    home: str
    """Where it would go if all were equal."""


def choose(
    family: str, clusters: Sequence[ClusterView], *, prefix_s: float, near_s: float = math.inf
) -> Choice:
    """Where a request of this family goes.

    Args:
        family: a hash of its first blocks; with tenant and adapter where caches are apart.
        clusters: at least one.
        prefix_s: what computing the prefix takes that its family shares.
        near_s: how far away its home may be, while there is a cluster within that.
    """
    home = home_of(family, _near(clusters, near_s))
    heard = [one for one in clusters if not one.silent] or list(clusters)
    # Not to wherever it is empty now: all fronts have to agree on the next home, too.
    home_now = home if home in heard else home_of(family, _near(heard, near_s))
    best = _soonest(heard, home_now, prefix_s)
    if home_now is not home:
        return Choice(best.name, Why.FAILED_OVER, home.name)
    return Choice(best.name, Why.HOME if best is home else Why.SPILLED, home.name)


def _near(clusters: Sequence[ClusterView], near_s: float) -> Sequence[ClusterView]:
    return [one for one in clusters if one.away_s <= near_s] or clusters


def home_of(family: str, clusters: Sequence[ClusterView]) -> ClusterView:
    """Where a family is at home; the same for every order of the clusters."""
    return max(clusters, key=lambda one: (_pull(family, one), one.name))


def _soonest(clusters: Sequence[ClusterView], home: ClusterView, prefix_s: float) -> ClusterView:
    def seconds(one: ClusterView) -> tuple[float, bool, str]:
        away = one is not home
        return one.away_s + one.wait_s + prefix_s * away, away, one.name

    return min(clusters, key=seconds)


def _pull(family: str, cluster: ClusterView) -> float:
    digest = blake2b(f"{family}\0{cluster.name}".encode(), digest_size=_BITS // 8).digest()
    share = (int.from_bytes(digest) + 0.5) / 2.0**_BITS
    return -cluster.replicas / math.log(share)
