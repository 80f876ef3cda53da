"""The keys that say how requests are placed, and what placement aims at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

from baton.config.bounds import Wait
from baton.config.leaves import Pluggable
from baton.policy.placement import Disaggregate
from baton.policy.prefix_index import IndexMode


class Policy(StrEnum):
    """How replicas are chosen: baton's own way, and those of others for comparison."""

    PREDICTED = "predicted"
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    SGLANG = "sglang"
    DYNAMO = "dynamo"
    LLMD = "llmd"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are placed."""

    policy: Annotated[str, Pluggable(Policy)] = Policy.PREDICTED
    """A policy's name, or a function of your own that chooses among candidates."""
    index: IndexMode = IndexMode.HYBRID
    """What tells which replica holds which prefix."""
    disaggregate: Disaggregate = Disaggregate.AUTO
    """`always` unless said where the policy is another's: those do not decide about it."""
    seed: int = 0
    """Of what placement draws at random; every coordinator draws its own numbers from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Latency objectives; null for none."""

    NOT_YET: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "attainment": "the share of requests that meet them is not watched, remove it",
            "window": "the share of requests that meet them is not watched, remove it",
        }
    )

    ttft_s: Annotated[float | None, Wait] = None
    """Until the first token."""
    tpot_s: Annotated[float | None, Wait] = None
    """Between tokens, on average over a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """What placement aims at."""

    NOT_YET: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"classes": "all requests have the same objectives, remove it"}
    )

    default: SloClass = field(default_factory=SloClass)
