"""Several clusters behind one front: what is lost by knowing little between them (simulated).

Each arm gets the same requests on the same replicas; only who chooses the cluster differs:

- `one exact`: no clusters at all, one scheduler that knows every replica and every cache. No system
  can be built so at this size; it is what the others are measured against.
- `federated`: `baton.policy.federation`, a home in each region by rendezvous hashing, spill-over by
  predicted seconds; `one home`: as that, with one home for all regions.
- `home only`: as `one home`, but nobody ever leaves it while it is heard of.
- `soonest`: where the wait is shortest, as last told; caches do not count.
- `at random`.

Then `federated` again while a whole cluster is lost, and with a region that asks for more than its
own clusters can serve, with and without spill-over (`near only`). A replica is coarse: see
`_federation_world`. Prints one JSON object, (S) throughout but for `decision_us` (M).

    python -m benchmarks.federation [--replicas 1000] [--write]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.policy.federation import Choice, ClusterView, Why, choose, home_of
from benchmarks._federation_world import Cluster, Load, Request, clusters_of, requests_of
from benchmarks._provenance import provenance

RESULT = Path(__file__).parent / "results" / "federation.json"
SECONDS = {100: 60.0, 1_000: 15.0, 10_000: 4.0}
"""By replicas: so long each is asked. At the largest, caches are far from full by then, in every
arm alike."""
_SEED = 7
_WARM = 0.4
"""Of the time: caches fill."""
_LOST_AT = 0.6
_NEAR_S = 0.01
_SURGE = 0.4
_TIMEOUT_S = 1.0
"""Until a request that was sent to a cluster that is gone is sent elsewhere."""

Arm = Callable[[str, Sequence[ClusterView], float, random.Random], Choice]


def federated(
    family: str, seen: Sequence[ClusterView], prefix_s: float, _: random.Random
) -> Choice:
    """Baton's."""
    return choose(family, seen, prefix_s=prefix_s, near_s=_NEAR_S)


def one_home(family: str, seen: Sequence[ClusterView], prefix_s: float, _: random.Random) -> Choice:
    """Whatever region asks."""
    return choose(family, seen, prefix_s=prefix_s)


def home_only(family: str, seen: Sequence[ClusterView], _s: float, _: random.Random) -> Choice:
    """Consistent hashing."""
    home = home_of(family, [one for one in seen if not one.silent] or seen).name
    return Choice(home, Why.HOME, home)


def near_only(family: str, seen: Sequence[ClusterView], _s: float, _: random.Random) -> Choice:
    """A home in each region, and no way out of it."""
    near = [one for one in seen if one.away_s <= _NEAR_S]
    return home_only(family, near, _s, _)


def soonest(family: str, seen: Sequence[ClusterView], _s: float, _: random.Random) -> Choice:
    """The shortest wait."""
    return choose(family, seen, prefix_s=0.0)


def at_random(_f: str, seen: Sequence[ClusterView], _s: float, rng: random.Random) -> Choice:
    """By lot."""
    name = rng.choice(seen).name
    return Choice(name, Why.HOME, name)


ARMS: dict[str, Arm] = {
    "federated": federated,
    "one home": one_home,
    "home only": home_only,
    "soonest": soonest,
    "at random": at_random,
}


@dataclass(slots=True)
class Front:
    """One region's front: what it was told, and what it has sent since."""

    region: int
    by_name: dict[str, Cluster]
    load: Load
    sent_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work since each cluster told of its load."""
    silent: dict[str, bool] = field(default_factory=dict)

    def look(self, now_s: float) -> None:
        """Take in what clusters told; what was sent before is in it."""
        self.sent_s = dict.fromkeys((one.name for one in self.by_name.values()), 0.0)
        self.silent = {
            one.name: now_s - one.told_at_s > self.load.silent_s for one in self.by_name.values()
        }

    def seen(self, now_s: float) -> list[ClusterView]:
        """Every cluster, as known here: what was told, and sent since, less what was done since."""
        return [
            ClusterView(
                name=one.name,
                replicas=len(one.free_at_s),
                away_s=0.0 if one.region == self.region else self.load.away_s,
                wait_s=max(
                    0.0,
                    one.told_wait_s
                    + self.sent_s[one.name] / len(one.free_at_s)
                    - (now_s - one.told_at_s),
                ),
                silent=self.silent[one.name],
            )
            for one in self.by_name.values()
        ]


@dataclass(slots=True)
class Tally:
    """What became of the requests that count."""

    waits_s: list[float] = field(default_factory=list)
    hits: int = 0
    away: int = 0
    why: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    sent_again: int = 0
    decided: int = 0
    deciding_s: float = 0.0

    def row(self) -> dict[str, object]:
        """For the result."""
        waits, count = sorted(self.waits_s), len(self.waits_s)
        return {
            "requests": count,
            "hit_share": round(self.hits / count, 4),
            "ttft_p50_s": round(waits[count // 2], 4),
            "ttft_p99_s": round(waits[int(count * 0.99)], 4),
            "ttft_mean_s": round(sum(waits) / count, 4),
            "other_region_share": round(self.away / count, 4),
            "spilled_share": round(self.why[Why.SPILLED] / count, 4),
            "failed_over_share": round(self.why[Why.FAILED_OVER] / count, 4),
            "sent_again": self.sent_again,
            "decision_us": round(1e6 * self.deciding_s / self.decided, 1) if self.decided else None,
        }


def exact(load: Load, seconds: float) -> dict[str, object]:
    """All replicas under one scheduler; half of the requests are in another region, on average."""
    (whole,), tally = clusters_of(load, count=1), Tally()
    rng = random.Random(_SEED)  # noqa: S311 - a load, not a secret
    for request in requests_of(load, seconds, rng):
        served = whole.serve(request, request.at_s)
        if request.at_s >= seconds * _WARM:
            tally.waits_s.append(served.first_token_s)
            tally.hits += served.hit
    return tally.row()


def run(load: Load, seconds: float, arm: Arm, *, lost: bool = False) -> dict[str, object]:
    """One arm, on clusters; `lost`: the first of them is gone from some time on."""
    clusters, tally, rng = clusters_of(load), Tally(), random.Random(_SEED + 1)  # noqa: S311 - a load, not a secret
    fronts = [
        Front(region, {one.name: one for one in clusters}, load) for region in range(load.regions)
    ]
    told_at_s, lost_at_s = -load.report_s, seconds * _LOST_AT if lost else float("inf")
    arrivals = random.Random(_SEED)  # noqa: S311 - as above
    for request in requests_of(load, seconds, arrivals):
        now_s = request.at_s
        clusters[0].down = now_s >= lost_at_s
        if now_s >= told_at_s + load.report_s:
            told_at_s = now_s
            for cluster in clusters:
                if not cluster.down:
                    cluster.tell(now_s)
            for front in fronts:
                front.look(now_s)
        counts = now_s >= (lost_at_s if lost else seconds * _WARM)
        _send(request, arm, fronts[request.region], tally if counts else Tally(), rng)
    return tally.row()


def _send(request: Request, arm: Arm, front: Front, tally: Tally, rng: random.Random) -> None:
    """Send one request where the arm says; again where nobody answers."""
    load, waited_s, seen = front.load, 0.0, front.seen(request.at_s)
    while True:
        began_s = time.perf_counter()
        choice = arm(str(request.family), seen, load.prefix_s, rng)
        tally.deciding_s += time.perf_counter() - began_s
        tally.decided += 1
        cluster = front.by_name[choice.cluster]
        if not cluster.down:
            break
        waited_s += _TIMEOUT_S
        tally.sent_again += 1
        seen = [one for one in seen if one.name != choice.cluster]
    served = cluster.serve(request, request.at_s)
    away_s = 0.0 if cluster.region == front.region else load.away_s
    front.sent_s[cluster.name] += request.own_s + (0.0 if served.hit else load.prefix_s)
    tally.waits_s.append(waited_s + away_s + served.first_token_s)
    tally.hits += served.hit
    tally.away += cluster.region != front.region
    tally.why[choice.why] += 1


def measured(replicas: int, seconds: float) -> dict[str, object]:
    """Every arm at one size."""
    load = Load(replicas=replicas)
    arms = {"one exact": exact(load, seconds)}
    arms |= {name: run(load, seconds, arm) for name, arm in ARMS.items()}
    arms["federated, a cluster lost"] = run(load, seconds, federated, lost=True)
    surge = replace(load, from_first_region=_SURGE)
    arms["federated, a region surges"] = run(surge, seconds, federated)
    arms["near only, a region surges"] = run(surge, seconds, near_only)
    return {"clusters": load.clusters, "seconds": seconds, "arms": arms}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, action="append", choices=SECONDS)
    parser.add_argument("--write", action="store_true", help=f"also into {RESULT.name}")
    chosen = parser.parse_args()
    sizes = chosen.replicas or list(SECONDS)
    found = {
        "simulated": True,
        "sizes": {str(size): measured(size, SECONDS[size]) for size in sizes},
        "provenance": provenance(),
    }
    if chosen.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
