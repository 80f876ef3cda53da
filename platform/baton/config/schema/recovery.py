"""The keys that say when a replica is given up, and how often requests are tried again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.config.language.bounds import Positive
from baton.config.language.scalars import Bounds
from baton.control.state.limits import RecoveryOptions

_OWN = RecoveryOptions()

# Replicas say that they live four times a second; what is sooner than twice that is no silence.
_Silence = Bounds(low=0.5, high=86_400)
_Pause = Bounds(low=0.001, high=_OWN.breaker.max_pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What is done about replicas that fail."""

    silence_s: Annotated[float, _Silence] = _OWN.silence_s
    """How long a replica on which something runs may say nothing, before all of it is taken
    elsewhere."""
    failures: Annotated[int, Positive] = _OWN.breaker.failures
    """Failures in a row after which a replica gets no work for a while."""
    pause_s: Annotated[float, _Pause] = _OWN.breaker.pause_s
    """How long that is at first; twice as long each time, half a minute at most."""
    retries: Annotated[float, Bounds(low=0, high=10)] = _OWN.retries.fraction
    """Second tries for each request that arrives, at most, besides a few."""
    hedge: Annotated[float | None, Bounds(low=1.1, high=1_000)] = _OWN.hedge.factor
    """How many times later than predicted a first token is, when an idle replica is tried instead;
    null: never."""
