"""The keys that say what requests are promised, who may ask, and what is let in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from baton.config.language.bounds import ClassName, Positive, Priority, Share, Timeout
from baton.config.language.fields import Key
from baton.config.language.scalars import Bounds, Condition
from baton.control.state.limits import CoordinatorLimits
from baton.domain.slo import NO_SLO
from baton.domain.tenant import CacheSharing, RateLimit, Tenant
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy

_LIMITS = CoordinatorLimits()
_ADMISSION = AdmissionOptions()
_DEFAULT_TENANT = Tenant()
_RATE = RateLimit()

# From once a day to more than any machine serves.
_Rate = Bounds(low=1e-5, high=1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloObjectives:
    """What a class is promised; null for what it is not."""

    ttft_s: Annotated[float | None, Timeout] = None
    """Until the first token."""
    tpot_s: Annotated[float | None, Timeout] = None
    """Between tokens, on average over a request."""
    itl_p99_s: Annotated[float | None, Timeout] = None
    """At most one in a hundred gaps between two tokens of a request may be longer."""
    attainment: Annotated[float, Share] = NO_SLO.attainment_target
    """The share of arrived requests that are to get all of it."""
    window_s: Annotated[float, Bounds(low=60, high=366 * 86_400)] = NO_SLO.window_s
    """Over which that share counts."""
    priority: Annotated[int, Priority] = NO_SLO.priority
    """Who comes first when not all can be served: higher numbers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClassConfig(SloObjectives):
    """A class besides `default`. It inherits nothing: what it does not say is not promised."""

    match: Annotated[str | None, Condition()] = None
    """Requests that fall into it by themselves; the first class whose condition holds counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """What requests are promised, by class."""

    default: SloObjectives = field(default_factory=SloObjectives)
    classes: Annotated[Mapping[str, SloClassConfig], ClassName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConfig:
    """How much may arrive, over the whole deployment; null for no limit."""

    requests_per_s: Annotated[float | None, Key("requests"), _Rate] = _RATE.requests_per_s
    """Requests that may arrive."""
    tokens_per_s: Annotated[float | None, Key("tokens"), _Rate] = _RATE.tokens_per_s
    """Prompt and output tokens."""
    burst_s: Annotated[float, Bounds(low=0.1, high=86_400)] = _RATE.burst_s
    """What comes in this time may come at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """Who asks; its name is its key. `default` is whoever has no key of another's."""

    priority: Annotated[int, Priority] = _DEFAULT_TENANT.priority
    """Added to that of its requests' class."""
    weight: Annotated[float, Bounds(low=0.001, high=1e6)] = _DEFAULT_TENANT.weight
    """Its share of GPU time among tenants of one priority, when all want more than there is."""
    rate: RateConfig = field(default_factory=RateConfig)
    max_in_flight: Annotated[int | None, Positive] = _DEFAULT_TENANT.max_in_flight
    """Requests at a time, over the whole deployment."""
    cache: CacheSharing = _DEFAULT_TENANT.cache
    """`isolated` unless said where the tenant has keys."""
    keys_file: str | None = None
    """Of its API keys, as `baton keys` writes it."""
    slo: str | None = None
    """The class of its requests; null: as conditions say, or `default`."""
    classes: tuple[str, ...] | None = None
    """Classes that its requests may ask for; null: those of no higher priority than its own."""
    anonymous: bool | None = None
    """Only of `default`: whether callers without a key are served. Null: if no tenant has keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a request may take."""

    first_token_s: Annotated[float, Timeout] = _LIMITS.first_token_timeout_s
    """From placement to the first token, before another replica is tried. Where nothing is
    promised, who is predicted to stand in a queue for longer is refused."""
    stall_s: Annotated[float, Timeout] = _LIMITS.stall_timeout_s
    """Between two tokens, before another replica is tried."""
    total_s: Annotated[float, Timeout] = _LIMITS.total_timeout_s
    """From arrival to the last token."""
    resume_s: Annotated[float, Timeout] = _LIMITS.resume_timeout_s
    """How long a stream that lost its replica waits for another."""
    drain_s: Annotated[float, Timeout] = _LIMITS.drain_timeout_s
    """How long streams may run on where a replica drains, before they are moved elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """What is let in."""

    policy: AdmissionPolicy = _ADMISSION.policy
    """Where something is promised: by prediction, or everyone while the queue has room."""
    max_engine_queue_delay_s: Annotated[float, Bounds(low=0, high=3_600)] = (
        _ADMISSION.max_engine_queue_delay_s
    )
    """Predicted prompt work that may wait inside an engine; what is beyond waits outside."""
    slo_safety_margin: Annotated[float, Bounds(low=0, high=0.99)] = (
        _ADMISSION.slo_safety_margin_fraction
    )
    """The fraction of an objective that is kept free, since predictions err."""
    max_queued_requests: Annotated[int, Positive] = _LIMITS.max_queued_requests
    """Requests that wait for a replica."""
    queue_timeout_s: Annotated[float, Timeout] = _LIMITS.queue_timeout_s
    """For a replica; who waits longer gets 503."""
    cold_start_timeout_s: Annotated[float, Timeout] = 300.0
    """The same where `autoscaler.scale_to_zero` has left a model without any replica: the request
    has one started, and waits for it. Where starts are known to take longer, it is refused sooner.
    """
    max_body_bytes: Annotated[int, Bounds(low=1024)] = 4 * 1024 * 1024
    """Of one request; larger ones get 413."""
    max_prompt_tokens: Annotated[int | None, Positive] = None
    """Of one prompt; longer ones get 400. Null for as many as the context holds."""
    max_n: Annotated[int | None, Positive] = 128
    """Answers to one request, and prompts in one batch; null leaves it to vLLM, which gives up to
    16,384. Source: OpenAI's API takes as many."""
    max_tokens: Annotated[int | None, Positive] = None
    """Tokens that a request may ask for; null for as many as the context holds."""
    default_max_tokens: Annotated[int | None, Positive] = 4096
    """At most, of a request that does not say, so that none runs to the end of a long context by
    accident; null for as many as the context holds."""
    max_messages: Annotated[int | None, Positive] = None
    """Messages of one request."""
    timeouts: Timeouts = field(default_factory=Timeouts)
