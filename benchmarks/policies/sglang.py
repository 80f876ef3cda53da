"""SGLang's cache-aware policy: the longest matching prefix, unless loads are too far apart.

Source: sglang-router / smg 0.3, policies/cache_aware.rs, with the defaults of its command line.

    imbalanced = max_load - min_load > balance_abs  and  max_load > min_load * balance_rel
    imbalanced: least loaded;  else the best match when matched / length > cache_threshold,
    else least loaded (of equals the first)

Approximations: the router's tree is over characters and gets no evictions; here the matched
length is in full blocks and comes from the prefix index, which in mode `predicted` is fed by the
routing decisions alone, as that tree is. Of several that match equally, the tree gives one that it
met; here it is the one that was sent the prefix last.

    router: {policy: "benchmarks.policies.sglang:SglangCacheAware", index: predicted}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from baton.domain.handoff import LegKind
from baton.policy.placement.chooser import Candidate
from baton.policy.placement.port import PlacementQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangParameters:
    """Defaults of the command line; those of the library are 32, 1.1 and 0.5."""

    balance_abs_threshold: int = 64
    """Requests in flight."""
    balance_rel_threshold: float = 1.5
    cache_threshold: float = 0.3
    """Share of the prompt that must match."""


class SglangCacheAware:
    """Chooses by SGLang's rule; its load is what this coordinator has in flight."""

    def __init__(self, parameters: SglangParameters | None = None) -> None:
        self._parameters = parameters or SglangParameters()

    def __call__(
        self,
        query: PlacementQuery,
        kind: LegKind,
        candidates: Sequence[Candidate],
        rng: Random,
    ) -> int:
        """The best match, or the least loaded."""
        del kind, rng
        loads = [candidate.view.inflight_legs for candidate in candidates]
        least = loads.index(min(loads))
        if self.imbalanced(loads):
            return least
        best = min(range(len(candidates)), key=lambda index: _match_key(candidates[index]))
        matched = candidates[best].hit.blocks * candidates[best].view.facts.block_size_tokens
        rate = matched / query.prompt_tokens if query.prompt_tokens else 0.0
        return best if rate > self._parameters.cache_threshold else least

    def imbalanced(self, loads: Sequence[int]) -> bool:
        """Whether loads are so far apart that prefixes no longer count."""
        low, high, parameters = min(loads), max(loads), self._parameters
        return (
            high - low > parameters.balance_abs_threshold
            and high > low * parameters.balance_rel_threshold
        )


def _match_key(one: Candidate) -> tuple[int, float, str]:
    tokens = one.hit.blocks * one.view.facts.block_size_tokens
    return -tokens, one.hit.age_s, one.view.replica_id
