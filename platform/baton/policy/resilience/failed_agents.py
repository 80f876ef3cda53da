"""When a target's own transfer agent has failed, and when it may be replaced.

A pair over which no pull succeeds does not show which end is at fault. The target is when its pulls
fail from every source, while those sources answer it and serve other targets. A source that does
not answer is no evidence. Where several targets look so at once, a common cause is likelier, and
none is replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MAX_NAMED_WITNESSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRules:
    """How sure one must be, and how seldom a replica is replaced for it."""

    failures: int = 4
    """Pulls in a row from one source, ..."""
    min_duration_s: float = 30.0
    """... and how long they have failed."""
    min_witnesses: int = 2
    """Sources that say so; where a target has one source only, that source."""
    replacement_interval_s: float = 600.0
    """From one replica's replacement to the next."""
    max_suspect_fraction: float = 0.25
    """Of the targets, but one in any case: where more look broken, none is replaced."""


class PullHistory(NamedTuple):
    """Results of probes of one pair, as far as they concern its target."""

    source_id: str
    consecutive_failures: int
    """Pulls in a row that failed, each after the source's side channel had answered."""
    failing_since_s: float
    """The first of them."""
    last_success_at_s: float | None
    """When blocks last came over the pair, for a probe or a request; None: never."""


def agent_failure_reason(
    pairs: Sequence[PullHistory],
    last_served_at_s: Mapping[str, float],
    now_s: float,
    rules: AgentRules,
) -> str | None:
    """Why a target's agent is taken for broken; None while it is not.

    Args:
        pairs: Every pair of that target that is watched.
        last_served_at_s: When a source last handed blocks to a target that is not suspected.
        now_s: The present.
        rules: How sure one must be.
    """
    failing = [
        pair
        for pair in pairs
        if pair.consecutive_failures >= rules.failures
        and now_s - pair.failing_since_s >= rules.min_duration_s
    ]
    if not failing:
        return None
    since_s = min(pair.failing_since_s for pair in failing)
    if any(
        pair.last_success_at_s is not None and pair.last_success_at_s > since_s for pair in pairs
    ):
        return None
    never = float("-inf")
    witnesses = sorted(
        pair.source_id
        for pair in failing
        if last_served_at_s.get(pair.source_id, never) > pair.failing_since_s
    )
    if len(witnesses) < min(rules.min_witnesses, len(pairs)):
        return None
    witness_names = ", ".join(witnesses[:_MAX_NAMED_WITNESSES]) + (
        ", ..." if len(witnesses) > _MAX_NAMED_WITNESSES else ""
    )
    return (
        f"its transfer agent is broken: for {now_s - since_s:.0f} s every pull from"
        f" {witness_names} has"
        " failed, though they answer it and serve other replicas"
    )


def choose_replacement(
    suspects: Collection[str],
    targets: int,
    *,
    last_notified: str | None,
    since_last_s: float | None,
    rules: AgentRules,
) -> str | None:
    """Which target to tell that it is to be replaced; None: none now.

    Every coordinator sees the same pulls fail, and chooses the same one.

    Args:
        suspects: Targets whose agents are taken for broken.
        targets: How many there are in all.
        last_notified: The last replica that was notified, which may not have got it.
        since_last_s: Since that; None: none was notified yet.
        rules: How many may be replaced, and how often.
    """
    if not suspects or len(suspects) > max(1.0, targets * rules.max_suspect_fraction):
        return None
    if last_notified in suspects:
        return last_notified
    if since_last_s is not None and since_last_s < rules.replacement_interval_s:
        return None
    return min(suspects)
