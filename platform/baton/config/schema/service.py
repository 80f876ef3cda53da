"""Keys of objectives, tenants and admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from baton.config.language.bounds import ClassName, Latency, Positive, Priority, Share, Timeout
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

# From once a day to more than any machine can serve.
_Rate = Bounds(low=1e-5, high=1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloObjectives:
    """Objectives of a class; null: no objective."""

    ttft_s: Annotated[float | None, Latency] = None
    """Time to the first token."""
    tpot_s: Annotated[float | None, Latency] = None
    """Time between tokens, averaged over a request."""
    itl_p99_s: Annotated[float | None, Latency] = None
    """Time between two tokens of a request, met by at least 99 % of its gaps."""
    attainment: Annotated[float, Share] = NO_SLO.attainment_target
    """Share of arrived requests that must meet all objectives."""
    window_s: Annotated[float, Bounds(low=60, high=366 * 86_400)] = NO_SLO.window_s
    """Period of that share."""
    priority: Annotated[int, Priority] = NO_SLO.priority
    """Order under overload: higher numbers are served first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClassConfig(SloObjectives):
    """A class in addition to `default`. It inherits nothing: missing objectives do not apply."""

    match: Annotated[str | None, Condition()] = None
    """Condition of requests that belong to the class; the first class whose condition holds
    applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Objectives of requests, by class."""

    default: SloObjectives = field(default_factory=SloObjectives)
    classes: Annotated[Mapping[str, SloClassConfig], ClassName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConfig:
    """Rate limits of the whole deployment; null: no limit."""

    requests_per_s: Annotated[float | None, Key("requests"), _Rate] = _RATE.requests_per_s
    """Arriving requests."""
    tokens_per_s: Annotated[float | None, Key("tokens"), _Rate] = _RATE.tokens_per_s
    """Prompt and output tokens."""
    burst_s: Annotated[float, Bounds(low=0.1, high=86_400)] = _RATE.burst_s
    """Requests and tokens of this period may arrive at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant; its name is its key. `default` has the callers without a key of another tenant."""

    priority: Annotated[int, Priority] = _DEFAULT_TENANT.priority
    """Added to the priority of its requests' class."""
    weight: Annotated[float, Bounds(low=0.001, high=1e6)] = _DEFAULT_TENANT.weight
    """Its share of GPU time among tenants of equal priority, under overload."""
    rate: RateConfig = field(default_factory=RateConfig)
    max_in_flight: Annotated[int | None, Positive] = _DEFAULT_TENANT.max_in_flight
    """Concurrent requests, over the whole deployment."""
    cache: CacheSharing = _DEFAULT_TENANT.cache
    """`isolated` by default for a tenant with keys."""
    keys_file: str | None = None
    """File of its API keys, written by `baton keys`."""
    slo: str | None = None
    """Class of its requests; null: by conditions, else `default`."""
    classes: tuple[str, ...] | None = None
    """Classes that its requests may select; null: those of no higher priority than its own class.
    """
    anonymous: bool | None = None
    """Only for `default`: whether callers without a key are served. Null: if no tenant has keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of a request."""

    first_token_s: Annotated[float, Timeout] = _LIMITS.first_token_timeout_s
    """From placement to the first token; then a retry on another replica. Without an objective, a
    request with a longer predicted queueing time is rejected."""
    stall_s: Annotated[float, Timeout] = _LIMITS.stall_timeout_s
    """Between two tokens; then a retry on another replica."""
    total_s: Annotated[float, Timeout] = _LIMITS.total_timeout_s
    """From arrival to the last token."""
    resume_s: Annotated[float, Timeout] = _LIMITS.resume_timeout_s
    """Time that a stream waits for another replica after it has lost its own."""
    drain_s: Annotated[float, Timeout] = _LIMITS.drain_timeout_s
    """Time that streams may continue on a draining replica before they are migrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Admission of requests."""

    MAIN_KEY: ClassVar[str] = "policy"

    policy: AdmissionPolicy = _ADMISSION.policy
    """For requests with objectives: admit by prediction, or admit while the queue has room."""
    max_engine_queue_delay_s: Annotated[float, Bounds(low=0, high=3_600)] = (
        _ADMISSION.max_engine_queue_delay_s
    )
    """Predicted prompt work that may wait inside an engine; the rest waits in the coordinator."""
    slo_safety_margin: Annotated[float, Bounds(low=0, high=0.99)] = (
        _ADMISSION.slo_safety_margin_fraction
    )
    """Fraction of an objective that is kept free for prediction errors."""
    max_queued_requests: Annotated[int, Positive] = _LIMITS.max_queued_requests
    """Requests that wait for a replica."""
    queue_timeout_s: Annotated[float, Timeout] = _LIMITS.queue_timeout_s
    """Time that a request waits for a replica; then it gets 503."""
    cold_start_timeout_s: Annotated[float, Timeout] = 300.0
    """The same when `autoscaler.scale_to_zero` has stopped all replicas of a model: the request
    starts a replica and waits for it. If starts are known to take longer, it is rejected sooner."""
    max_body_bytes: Annotated[int, Bounds(low=1024)] = 4 * 1024 * 1024
    """Size of a request; a larger request gets 413."""
    max_prompt_tokens: Annotated[int | None, Positive] = None
    """Tokens of a prompt; a longer prompt gets 400. Null: as many as the context holds."""
    max_n: Annotated[int | None, Positive] = 128
    """Answers to one request, and prompts in one batch; null: vLLM's limit, 16,384. Source: the
    limit of OpenAI's API."""
    max_tokens: Annotated[int | None, Positive] = None
    """Output tokens that a request may ask for; null: as many as the context holds."""
    default_max_tokens: Annotated[int | None, Positive] = 4096
    """Limit of output tokens for requests without `max_tokens`, so that no answer fills a long
    context by accident. Null: as many as the context holds."""
    max_messages: Annotated[int | None, Positive] = None
    """Messages of one request."""
    timeouts: Timeouts = field(default_factory=Timeouts)
