"""Routes, legs, and the KV handles and leases by which KV blocks change hands."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from baton.domain.hashed_prompt import TokenIds
from baton.domain.request import FinishReason
from baton.domain.value import Value

RENEWALS_PER_LEASE = 6
"""How often a lease is renewed in its time while a leg waits for its blocks."""


class HandoffMode(StrEnum):
    """How KV blocks get from the prefill replica to the decode replica."""

    LOCAL = "local"
    """They do not: one replica runs both phases."""
    PULL = "pull"
    """Prefill finishes first; the decode replica then reads the blocks."""


class RouteReason(StrEnum):
    """Why placement chose what it chose (a metric label, hence an enum)."""

    DISAGGREGATED = "disaggregated"
    LOCAL_FASTER = "local_faster"
    """Prefilling on the decode replica is predicted to cost less than a handoff."""
    DECODE_ON_PREFILL = "decode_on_prefill"
    """A prefill replica decodes it, too: that is predicted to keep more objectives than a handoff,
    or there is next to nothing to decode."""
    PREFIX_FETCH = "prefix_fetch"
    """Another replica holds much of the prompt: its blocks are fetched, and the rest computed."""
    LOCAL_ONLY = "local_only"
    DISAGGREGATION_OFF = "disaggregation_off"
    NO_PREFILL_REPLICA = "no_prefill_replica"
    NO_DECODE_REPLICA = "no_decode_replica"
    MIXED_POOL = "mixed_pool"
    INCOMPATIBLE = "incompatible"
    NO_LINK = "no_link"
    """No pair of replicas that could hand it over is in order."""


class Route(Value, kw_only=True):
    """The outcome of placement. `prefill_replica_id` is None exactly when the mode is LOCAL."""

    mode: HandoffMode
    prefill_replica_id: str | None
    decode_replica_id: str
    reason: RouteReason
    prefill_tokens: int | None = None
    """Leading prompt tokens that the prefill replica is asked for; None: all of them."""

    def __post_init__(self) -> None:
        if (self.mode is HandoffMode.LOCAL) != (self.prefill_replica_id is None):
            raise ValueError(f"route {self}: a LOCAL route, and only that, has no prefill replica")


class HitSource(StrEnum):
    """How it is known that a replica holds a prefix."""

    NONE = "none"
    """It is not known to hold any of it."""
    REPORTED = "reported"
    """Its engine reported it."""
    PREDICTED = "predicted"
    """We sent the same prefix there."""


class RouteOption(Value, kw_only=False):
    """One way to run a request, and its predicted cost."""

    mode: HandoffMode
    prefill_replica_id: str | None
    decode_replica_id: str
    hit_tokens: int
    """Prompt tokens that the prefill replica need not compute."""
    hit_source: HitSource
    hit_age_s: float
    """How long ago the source last vouched for the hit; 0 without one."""
    queue_s: float
    """Until the prefill begins, or the load of its adapter."""
    prefill_s: float
    transfer_s: float
    decode_s: float
    """From the blocks' arrival to the first token; 0 when LOCAL."""
    interference_s: float
    """Delay of the streams that run there, added up over all of them."""
    cost_s: float = 0.0
    """Cost by which options are compared once the TTFT objective is met: all of the above that
    counts, its own time decoding, and the cost of evicted blocks."""
    expected_misses: float = 0.0
    """How many requests, new and running, were predicted to miss an objective for it; 0 without a
    TPOT objective."""
    is_early_token: bool = False
    """Whether its first token comes with the end of the prefill, before its blocks are moved."""
    adapter_load_s: float = 0.0
    """To load its adapter where its prompt is computed, before the prefill; no queue makes it
    shorter, and waiting elsewhere does not either."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token, from the decision on."""
        prefill_done_s = self.queue_s + self.adapter_load_s + self.prefill_s
        return (
            prefill_done_s
            if self.is_early_token
            else prefill_done_s + self.transfer_s + self.decode_s
        )

    @property
    def first_decode_token_s(self) -> float:
        """Predicted time until the decode replica has given a token, from the decision on."""
        return self.queue_s + self.adapter_load_s + self.prefill_s + self.transfer_s + self.decode_s


class ReplicationCredit(Value, kw_only=False):
    """The loss of a request, and of its neighbours, because a replica does not hold its prefix."""

    replica_id: str
    blocks: int
    """Leading blocks of the prompt."""
    seconds: float
    """Below 0: the cost of computing them once more."""


class PlacementDecision(Value, kw_only=True):
    """A route, and the options that it was chosen from."""

    route: Route
    policy: str
    at_s: float
    options: tuple[RouteOption, ...] = ()
    """The best three, best first; empty for a policy that predicts nothing."""
    options_considered: int = 0
    """How many options were looked at."""
    replication_credit: ReplicationCredit | None = None
    """The gain if another replica had held the prefix of the prompt, too."""

    @property
    def chosen(self) -> RouteOption | None:
        """The option that became the route; None when it is not among those that were kept."""
        route = self.route
        route_key = (route.mode, route.prefill_replica_id, route.decode_replica_id)
        for option in self.options:
            if (option.mode, option.prefill_replica_id, option.decode_replica_id) == route_key:
                return option
        return None


class LegKind(StrEnum):
    """Which phases one submission to an engine covers."""

    LOCAL = "local"
    PREFILL = "prefill"
    DECODE = "decode"


class KvHandle(Value, kw_only=True):
    """Data with which another engine can fetch a prompt's KV blocks from a prefill replica.

    `params` is the engine's own encoding; only engines read it.
    """

    tokens: int
    blocks: int
    params: bytes


class Leg(Value, kw_only=True):
    """One submission of a request to one engine; a request has one or more.

    `prompt_token_ids` ends with `resumed_tokens` ids that were generated before a resume, and
    `max_tokens` / `min_tokens` are what is left to generate. A prefill leg generates one token,
    which is thrown away unless it `emits_first_token`.
    """

    leg_id: str
    request_id: str
    kind: LegKind
    prompt_token_ids: TokenIds
    resumed_tokens: int = 0
    max_tokens: int
    min_tokens: int = 0
    priority: int = 0
    kv_handle: KvHandle | None = None
    source_id: str | None = None
    """The replica that the KV handle's blocks are on."""
    cache_salt: str | None = None
    adapter: str | None = None
    """The LoRA adapter that it is computed with."""
    emits_first_token: bool = False
    """Of a prefill leg: its token is the client's, and drawn as the request wants it."""
    uncached_tokens: int | None = None
    """How many prompt tokens its replica is expected to compute; None: all that it does not pull.
    Engines know only when they begin with a leg how much of its prompt is cached."""
    payload: bytes = b""

    def __post_init__(self) -> None:
        if (self.kind is LegKind.DECODE) != (self.kv_handle is not None):
            raise ValueError(
                f"leg {self.leg_id!r}: a decode leg, and only that, carries a KV handle"
            )
        if self.emits_first_token and self.kind is not LegKind.PREFILL:
            raise ValueError(f"leg {self.leg_id!r}: only a prefill leg may give its token or not")

    @property
    def uncached_prompt_tokens(self) -> int:
        """Prompt tokens that its replica will have to compute, as far as anybody can tell."""
        pulled_tokens = 0 if self.kv_handle is None else self.kv_handle.tokens
        max_tokens_to_compute = max(0, len(self.prompt_token_ids) - pulled_tokens)
        return (
            max_tokens_to_compute
            if self.uncached_tokens is None
            else min(max_tokens_to_compute, self.uncached_tokens)
        )


class LegTimes(NamedTuple):
    """An engine's times of a leg, by a clock of its own."""

    queue_s: float
    """From when the engine got it until it first computed for it; a pull of its blocks included."""
    compute_s: float
    """From then until its first output."""
    preemptions: int = 0
    """How often it was put back to wait, so far."""


class CacheUse(NamedTuple):
    """Where cached prompt tokens came from, and how many are new in a prefix cache."""

    external_tokens: int = 0
    """Of the cached tokens: those from outside of the engine's own prefix cache. They came from
    another engine, or from a store below the cache."""
    created_tokens: int = 0
    """Of the tokens that were not cached: those that the engine computed and now keeps in its
    prefix cache. An engine caches full blocks only."""


class LegOutput(NamedTuple):
    """The output of one engine step for one leg.

    A NamedTuple, not a dataclass: there is one per running request per step, and on the link it is
    sent as an array without field names. A finished prefill leg carries a `kv_handle`. A leg whose
    token is the last of its request may, though no replica will pull its blocks.
    """

    leg_id: str
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    kv_handle: KvHandle | None = None
    cached_tokens: int | None = None
    """Prompt tokens the engine did not compute itself; reported once, with the first output."""
    engine_payload: bytes | None = None
    """The engine's own encoding of data that decisions do not need (logprobs and the like)."""
    times: LegTimes | None = None
    """Reported with its first output, and with its last when it was preempted since; an engine that
    keeps no times says nothing."""
    cache_use: CacheUse | None = None
    """Comes with `cached_tokens`, where the engine knows it."""


class LegFailure(StrEnum):
    """Why a leg ended without its engine finishing it."""

    REJECTED = "rejected"
    """The engine did not accept it, and has not failed: another try would end the same."""
    INVALID = "invalid"
    """Likewise, because of its request: the client gets the reason."""
    ENGINE_ERROR = "engine_error"
    KV_LOAD_FAILED = "kv_load_failed"
    OVERLOADED = "overloaded"
    """A bounded queue on the way was full."""
    UNREACHABLE = "unreachable"
    """The link to the replica is down."""
    DRAINING = "draining"


class Lease(Value, kw_only=True):
    """The duty of a prefill replica to keep the blocks of one finished prefill leg."""

    leg_id: str
    request_id: str
    replica_id: str
    kv_handle: KvHandle
    granted_at_s: float
    expires_at_s: float


def renewed_expiry_s(now_s: float, duration_s: float) -> float:
    """When a lease of `duration_s` expires that is renewed now: after two thirds of it.

    Source: vLLM 0.32, kv_connector/v1/nixl/base_worker.py `_handle_heartbeat`.
    """
    return now_s + duration_s * 2 / 3
