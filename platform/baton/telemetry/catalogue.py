"""Every metric of baton: its name, kind, unit, labels and meaning.

Collectors, dashboards, alert rules and documents name metrics by these values only: tests find a
name that is not here. A scrape adds the labels `component`, `pool` and `replica` to each target.

Names are `baton_<noun>_<unit>[_total]`, in seconds, bytes and tokens. Values of labels are bounded:
they come from enumerations, the configuration or the fleet, and those beyond `MAX_LABEL_VALUES`
count as `OTHER`. Nothing is counted per token: counters read existing totals, histograms observe
once a request or once an engine step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

OTHER: Final = "other"
"""Stands for values of a label beyond `MAX_LABEL_VALUES`."""
MAX_LABEL_VALUES: Final = 256
"""Of one label of one metric in one process."""
DESIRED: Final = "asked"
"""Of `input`: the policy's desired replicas, before bounds."""
UNMET: Final = "unmet"
"""Of `input`, from baton's own policy: replicas that a role lacks because its pools are at their
maximum."""


class PoolCount(StrEnum):
    """Of `state`: the state of a pool's replicas."""

    DESIRED = "desired"
    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"


class PoolBound(StrEnum):
    """Of `bound`."""

    MIN = "min"
    MAX = "max"


class EnginePhase(StrEnum):
    """Of `phase`: the work of an engine step; a mixed step counts for both."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineRequestState(StrEnum):
    """Of `state`: the state of a request within an engine."""

    RUNNING = "running"
    QUEUED = "queued"
    PULLING = "pulling"
    """Its KV blocks are in transfer."""


class FrameOutcome(StrEnum):
    """Of `state`: the result of a frame of the fleet link."""

    RECEIVED = "received"
    SENT = "sent"
    BAD = "bad"
    DROPPED = "dropped"
    """The session was over, or the send queue full."""


class ScalingAction(StrEnum):
    """Of `action`."""

    START = "start"
    STOP = "stop"
    FLIP = "flip"


class TickOutcome(StrEnum):
    """Of `outcome`: the end of a tick of the scaling loop."""

    DECIDED = "decided"
    PAUSED = "paused"
    """An input was missing, so nothing changed."""
    FAILED = "failed"


class Window(StrEnum):
    """Of `window`: the time over which attainment is computed."""

    RECENT = "recent"
    """About the last 30 s, which the autoscaler uses."""
    TARGET = "target"
    """The period of the class's target, at most the life of this controller."""


class Kind(StrEnum):
    """How a metric's value changes."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Component(StrEnum):
    """The process that exposes a metric; the label `component` of its target."""

    INGRESS = "ingress"
    REPLICA = "replica"
    CONTROLLER = "controller"


class Label(StrEnum):
    """Names of labels."""

    SLO_CLASS = "slo_class"
    TENANT = "tenant"
    MODEL = "model"
    POOL = "pool"
    OUTCOME = "outcome"
    """Of requests: a final `domain.request.Phase`, or `client_error`. Of admissions:
    `domain.demand.AdmissionOutcome`."""
    OBJECTIVE = "objective"
    """See `Objective`."""
    PART = "part"
    """See `telemetry.requests.waterfall.Part`."""
    REASON = "reason"
    """Of admissions: `domain.demand.AdmissionPath` or `domain.errors.Cause`. Of placements:
    `domain.handoff.RouteReason`. Of status 401: `engine.vllm.gate.access.Unauthorized`."""
    MODE = "mode"
    PHASE = "phase"
    TOKENS = "tokens"
    """See `TokenKind`."""
    SOURCE = "source"
    TARGET = "target"
    """`SOURCE` and `TARGET` are replicas: blocks move from one to the other."""
    TRANSPORT = "transport"
    STATE = "state"
    ROLE = "role"
    BOUND = "bound"
    INPUT = "input"
    ACTION = "action"
    WINDOW = "window"
    VERSION = "version"
    ENGINE = "engine"
    EDGES = "edges"


class Objective(StrEnum):
    """An objective that an evaluated request met."""

    GOODPUT = "goodput"
    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"


class TokenKind(StrEnum):
    """Tokens of requests, by cost."""

    PROMPT = "prompt"
    CACHED = "cached"
    """The part of the prompt that no engine computed."""
    OUTPUT = "output"


class Deadline(StrEnum):
    """A timeout that bounds the observations of a histogram, by its key in the configuration."""

    QUEUE_WAIT = "admission.queue_timeout"
    FIRST_TOKEN = "admission.timeouts.first_token"  # noqa: S105 - a key of the configuration
    STALL = "admission.timeouts.stall"
    RESUME = "admission.timeouts.resume"
    TOTAL = "admission.timeouts.total"
    TRANSFER = "transfer.deadline"
    LEASE = "transfer.lease"


MAX_TIMEOUT_S: Final = 86_400.0
"""The longest timeout or objective that the configuration allows."""

# Coarse steps: slow requests need no precise quantile.
_SLOW_EDGES_S: Final = (
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 7_200.0, MAX_TIMEOUT_S,
)  # fmt: skip

# OpenTelemetry's advice for `gen_ai.server.*`, extended to the longest timeout. Source:
# OpenTelemetry semantic conventions, Generative AI metrics.
TTFT_EDGES_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    *_SLOW_EDGES_S,
)  # fmt: skip
TPOT_EDGES_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, *_SLOW_EDGES_S,
)  # fmt: skip
DURATION_EDGES_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 600.0, 1_800.0, 7_200.0, MAX_TIMEOUT_S,
)  # fmt: skip
ITL_EDGES_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
    *_SLOW_EDGES_S,
)  # fmt: skip

# No timeout bounds the error of a prediction.
RATIO_EDGES: Final = (
    0.05, 0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 20.0, 100.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Declares a metric."""

    name: str
    """As a query writes it: counters with `_total`, histograms without `_bucket`."""
    kind: Kind
    component: Component
    help: str
    labels: tuple[Label, ...] = ()
    edges: tuple[float, ...] = ()
    objective: Objective | None = None
    """A histogram has an edge at each class's objective of this kind."""
    deadlines: tuple[Deadline, ...] = ()
    """A histogram has an edge at each of these timeouts."""
    deprecated_name: str | None = None
    """A former name, which is exported too. Histograms have none: they are most of a scrape."""

    @property
    def names(self) -> tuple[str, ...]:
        """All exported names."""
        return (self.name,) if self.deprecated_name is None else (self.name, self.deprecated_name)


def _metric(
    kind: Kind,
    component: Component,
    name: str,
    text: str,
    *labels: Label,
    formerly: str | None = None,
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        component=component,
        help=text,
        labels=labels,
        deprecated_name=formerly,
    )


_counter = partial(_metric, Kind.COUNTER)
_gauge = partial(_metric, Kind.GAUGE)


def _histogram(
    name: str,
    text: str,
    edges: tuple[float, ...],
    *labels: Label,
    objective: Objective | None = None,
    deadlines: tuple[Deadline, ...] = (),
) -> Metric:
    follows_config = bool(objective or deadlines)
    return Metric(
        name=name,
        kind=Kind.HISTOGRAM,
        component=Component.INGRESS,
        help=text,
        labels=(*labels, Label.EDGES) if follows_config else labels,
        edges=edges,
        objective=objective,
        deadlines=deadlines,
    )


_INGRESS, _REPLICA, _CONTROLLER = Component.INGRESS, Component.REPLICA, Component.CONTROLLER
_REQUEST_LABELS = (Label.SLO_CLASS, Label.TENANT, Label.MODEL, Label.POOL)
_LATENCY_LABELS = (Label.SLO_CLASS, Label.MODEL, Label.POOL)

# A gap can contain a stall, the placement of a resume and its first token. With early first tokens
# it contains a handoff, too.
_GAP_DEADLINES = (
    Deadline.STALL,
    Deadline.RESUME,
    Deadline.FIRST_TOKEN,
    Deadline.TRANSFER,
    Deadline.TOTAL,
)

# ------------------------------------------------------------------- ingress: what clients got
REQUESTS = _counter(
    _INGRESS, "baton_requests_total", "Ended requests, by outcome.", *_REQUEST_LABELS, Label.OUTCOME
)
SLO_REQUESTS = _counter(
    _INGRESS, "baton_slo_requests_total", "Requests evaluated against their SLO.", *_REQUEST_LABELS
)
SLO_GOOD = _counter(
    _INGRESS,
    "baton_slo_good_requests_total",
    "Evaluated requests that met the objective; `goodput`: every objective.",
    *_REQUEST_LABELS,
    Label.OBJECTIVE,
)
SLO_EXCLUDED = _counter(
    _INGRESS,
    "baton_slo_excluded_requests_total",
    "Excluded requests: cancelled before a token was due.",
    *_REQUEST_LABELS,
    formerly="baton_slo_excused_requests_total",
)
TOKENS = _counter(
    _INGRESS,
    "baton_tokens_total",
    "Tokens of ended requests, by kind.",
    *_REQUEST_LABELS,
    Label.TOKENS,
)
TTFT = _histogram(
    "baton_time_to_first_token_seconds",
    "Arrival to first token.",
    TTFT_EDGES_S,
    *_LATENCY_LABELS,
    objective=Objective.TTFT,
    deadlines=(Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
TPOT = _histogram(
    "baton_time_per_output_token_seconds",
    "Mean gap between tokens, per request.",
    TPOT_EDGES_S,
    *_LATENCY_LABELS,
    objective=Objective.TPOT,
    deadlines=_GAP_DEADLINES,
)
MAX_ITL = _histogram(
    "baton_worst_token_gap_seconds",
    "Longest gap between tokens, per request.",
    ITL_EDGES_S,
    *_LATENCY_LABELS,
    objective=Objective.ITL,
    deadlines=_GAP_DEADLINES,
)
ITL = _histogram(
    "baton_inter_token_seconds",
    "Gaps between tokens; one observation per engine step for all its streams.",
    ITL_EDGES_S,
    Label.POOL,
    objective=Objective.ITL,
    deadlines=(Deadline.STALL, Deadline.TOTAL),
)
DURATION = _histogram(
    "baton_request_duration_seconds",
    "Arrival to end of finished requests.",
    DURATION_EDGES_S,
    *_LATENCY_LABELS,
    deadlines=(Deadline.TOTAL,),
)
QUEUE_WAIT = _histogram(
    "baton_held_seconds",
    "Queue wait before the first placement.",
    DURATION_EDGES_S,
    *_LATENCY_LABELS,
    objective=Objective.TTFT,
    deadlines=(Deadline.QUEUE_WAIT, Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
HANDOFF_GAP = _histogram(
    "baton_handoff_gap_seconds",
    "End of prefill to first token of handed-off requests.",
    TTFT_EDGES_S,
    *_LATENCY_LABELS,
    deadlines=(Deadline.TRANSFER, Deadline.LEASE, Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
TTFT_PARTS = _counter(
    _INGRESS, "baton_ttft_part_seconds_total", "Total TTFT, by part.", *_LATENCY_LABELS, Label.PART
)

# ------------------------------------------------------------------- ingress: admission and routes
ADMISSIONS = _counter(
    _INGRESS,
    "baton_admissions_total",
    "Admission outcomes, by reason.",
    Label.SLO_CLASS,
    Label.OUTCOME,
    Label.REASON,
)
IN_FLIGHT = _gauge(_INGRESS, "baton_in_flight_requests", "Requests in flight.", Label.PHASE)
QUEUED_REQUESTS = _gauge(
    _INGRESS, "baton_queued_requests", "Queued requests.", formerly="baton_held_requests"
)
SLACK = _gauge(
    _INGRESS,
    "baton_ttft_slack_seconds",
    "Time left to the most urgent TTFT objective; below 0: late.",
)
PLACEMENTS = _counter(
    _INGRESS, "baton_placements_total", "Placements of ended requests.", Label.MODE, Label.REASON
)
RESUMES = _counter(_INGRESS, "baton_resumes_total", "Streams resumed on another replica.")
RETRIES = _counter(
    _INGRESS,
    "baton_retries_total",
    "Retries on another replica.",
    Label.REASON,
    formerly="baton_second_tries_total",
)
RETRIES_DENIED = _counter(
    _INGRESS,
    "baton_retries_denied_total",
    "Retries denied by the retry budget.",
    formerly="baton_second_tries_refused_total",
)
CIRCUIT_BREAKERS = _gauge(
    _INGRESS,
    "baton_circuit_breakers",
    "Circuit breakers of replicas.",
    Label.POOL,
    Label.STATE,
    formerly="baton_circuits",
)
TTFT_RATIO = _histogram(
    "baton_ttft_prediction_ratio",
    "Predicted over actual TTFT; above 1: predicted too long.",
    RATIO_EDGES,
    Label.MODE,
    Label.MODEL,
)
STEP_ERROR = _gauge(
    _INGRESS, "baton_step_time_error_fraction", "Mean error of predicted step times.", Label.POOL
)
PREDICTED_HIT_TOKENS = _counter(
    _INGRESS, "baton_predicted_hit_tokens_total", "Prompt tokens predicted as cached."
)
INDEX_BLOCKS = _gauge(
    _INGRESS, "baton_prefix_index_blocks", "Blocks in the prefix index.", Label.SOURCE
)

# ------------------------------------------------------------------- ingress: links and leases
LINK_PAIRS = _gauge(_INGRESS, "baton_link_pairs", "Replica pairs.", Label.STATE)
LINK_BANDWIDTH = _gauge(
    _INGRESS,
    "baton_link_bandwidth_bytes_per_second",
    "Estimated bandwidth of a pair.",
    Label.SOURCE,
    Label.TARGET,
    Label.TRANSPORT,
)
LINK_SETUP = _gauge(
    _INGRESS, "baton_link_setup_seconds", "Fixed time per pull.", Label.SOURCE, Label.TARGET
)
LINK_QUARANTINED = _gauge(
    _INGRESS, "baton_link_quarantined", "1: the pair is quarantined.", Label.SOURCE, Label.TARGET
)
AGENT_FAILED = _gauge(
    _INGRESS,
    "baton_agent_failed",
    "1: pulls into the replica fail from all sources.",
    Label.TARGET,
    formerly="baton_agent_broken",
)
HANDOFF_FAILURES = _counter(
    _INGRESS,
    "baton_handoff_failures_total",
    "Failed handoffs.",
    Label.TARGET,
    formerly="baton_broken_handoffs_total",
)
INGRESS_KV_LEASES = _gauge(
    _INGRESS,
    "baton_ingress_kv_leases",
    "KV leases that wait for a pull.",
    Label.POOL,
    formerly="baton_leases",
)
UNREACHABLE_REPLICAS = _gauge(
    _INGRESS,
    "baton_unreachable_replicas",
    "Replicas known to Ray but unreachable.",
    formerly="baton_unjoined_replicas",
)

# ------------------------------------------------------------------- ingress: access
TLS_EXPIRES = _gauge(
    _INGRESS,
    "baton_tls_expires_seconds",
    "Time until the certificate expires; below 0: expired.",
)
VALID_KEYS = _gauge(_INGRESS, "baton_valid_api_keys", "Valid API keys.", Label.TENANT)
KEYS_EXPIRE = _gauge(
    _INGRESS,
    "baton_api_keys_expire_seconds",
    "Time until the tenant's last API key expires; below 0: expired.",
    Label.TENANT,
)
UNAUTHORIZED = _counter(
    _INGRESS,
    "baton_unauthorized_requests_total",
    "Requests with status 401; not counted with the Rust frontend.",
    Label.REASON,
)

# ------------------------------------------------------------------- replicas
REPLICA_INFO = _gauge(
    _REPLICA,
    "baton_replica_info",
    "Always 1.",
    Label.ROLE,
    Label.MODEL,
    Label.ENGINE,
    Label.VERSION,
)
STEPS = _counter(_REPLICA, "baton_engine_steps_total", "Engine steps.", Label.PHASE)
ENGINE_BUSY = _counter(_REPLICA, "baton_engine_busy_seconds_total", "Time in engine steps.")
COMPUTED_TOKENS = _counter(_REPLICA, "baton_engine_tokens_total", "Computed tokens.", Label.PHASE)
ENGINE_REQUESTS = _gauge(_REPLICA, "baton_engine_requests", "Requests in the engine.", Label.STATE)
QUEUED_TOKENS = _gauge(_REPLICA, "baton_engine_queued_tokens", "Queued prompt tokens.")
KV_USED = _gauge(_REPLICA, "baton_engine_kv_used_fraction", "KV cache usage.")
STEP_TIME = _gauge(_REPLICA, "baton_engine_step_seconds", "Moving average of step time.")
PULLS = _counter(
    _REPLICA,
    "baton_transfer_pulls_total",
    "KV pulls into the replica.",
    Label.SOURCE,
    Label.TRANSPORT,
)
PULLED_BYTES = _counter(
    _REPLICA, "baton_transfer_bytes_total", "Pulled bytes.", Label.SOURCE, Label.TRANSPORT
)
PULL_TIME = _counter(
    _REPLICA, "baton_transfer_seconds_total", "Time in pulls.", Label.SOURCE, Label.TRANSPORT
)
PULL_FAILURES = _counter(_REPLICA, "baton_transfer_failures_total", "Failed pulls.", Label.SOURCE)
EXPIRED_LEASES = _counter(_REPLICA, "baton_expired_leases_total", "KV leases that expired.")
VOID_PULLS = _counter(
    _REPLICA, "baton_void_pulls_total", "Pulls discarded: the source no longer held the blocks."
)
ADAPTERS = _gauge(_REPLICA, "baton_adapters_loaded", "Loaded or loading LoRA adapters.")
ADAPTER_HITS = _counter(
    _REPLICA, "baton_adapter_hits_total", "Legs that found their adapter loaded or loading."
)
ADAPTER_LOADS = _counter(_REPLICA, "baton_adapter_loads_total", "Adapter loads.")
ADAPTER_TIME = _counter(
    _REPLICA,
    "baton_adapter_load_seconds_total",
    "Time in adapter loads; the engine computes nothing else.",
)
LIVE_LEGS = _gauge(_REPLICA, "baton_live_legs", "Legs in flight.")
REPLICA_KV_LEASES = _gauge(
    _REPLICA, "baton_replica_kv_leases", "KV leases held.", formerly="baton_held_leases"
)
COORDINATORS = _gauge(_REPLICA, "baton_coordinators", "Connected coordinators.")
LINK_FRAMES = _counter(_REPLICA, "baton_link_frames_total", "Fleet link frames.", Label.STATE)
LINK_AUTH_FAILURES = _counter(
    _REPLICA,
    "baton_link_auth_failures_total",
    "Fleet link connections that failed authentication.",
    formerly="baton_link_strangers_total",
)

# ------------------------------------------------------------------- controller: pools
POOL_REPLICAS = _gauge(
    _CONTROLLER, "baton_pool_replicas", "Replicas, by state.", Label.POOL, Label.STATE
)
POOL_ROLES = _gauge(
    _CONTROLLER, "baton_pool_role_replicas", "Ready replicas.", Label.POOL, Label.ROLE
)
POOL_BOUNDS = _gauge(
    _CONTROLLER, "baton_pool_bound_replicas", "Configured `min` and `max`.", Label.POOL, Label.BOUND
)
POOL_BUSY = _gauge(
    _CONTROLLER, "baton_pool_busy_fraction", "Time share in engine steps.", Label.POOL
)
POOL_COLD_START = _gauge(_CONTROLLER, "baton_pool_cold_start_seconds", "Cold start.", Label.POOL)
POOL_CAPACITY = _gauge(
    _CONTROLLER,
    "baton_pool_capacity_tokens_per_second",
    "Calibrated capacity of one replica.",
    Label.POOL,
    Label.TOKENS,
)
POOL_PRICE = _gauge(_CONTROLLER, "baton_pool_price_per_hour", "Price of one replica.", Label.POOL)

# ------------------------------------------------------------------- controller: demand, scaling
DEMAND_REQUESTS = _gauge(_CONTROLLER, "baton_demand_requests_per_second", "Demand.")
DEMAND_TOKENS = _gauge(
    _CONTROLLER,
    "baton_demand_tokens_per_second",
    "Demand: uncached prompt and output tokens.",
    Label.TOKENS,
)
SCALING_INPUT = _gauge(
    _CONTROLLER, "baton_scaling_input", "Inputs of the last decision.", Label.POOL, Label.INPUT
)
SCALING_DECISIONS = _counter(
    _CONTROLLER,
    "baton_scaling_decisions_total",
    "Decisions, one per tick.",
    Label.POOL,
    Label.REASON,
)
SCALING_ACTIONS = _counter(
    _CONTROLLER,
    "baton_scaling_actions_total",
    "Started, stopped or flipped replicas.",
    Label.POOL,
    Label.ACTION,
)
AUTOSCALER_PAUSED = _gauge(
    _CONTROLLER,
    "baton_autoscaler_paused",
    "1: paused, an input is missing.",
    formerly="baton_scaling_held",
)
AUTOSCALER_TICKS = _counter(
    _CONTROLLER,
    "baton_autoscaler_ticks_total",
    "Autoscaler ticks.",
    Label.OUTCOME,
    formerly="baton_scaling_turns_total",
)
POOL_OVERRIDES = _gauge(
    _CONTROLLER,
    "baton_pool_overrides",
    "Pools with an operator override.",
    formerly="baton_overridden_pools",
)
REPORT_AGE = _gauge(_CONTROLLER, "baton_report_age_seconds", "Time since every ingress reported.")
UNRESPONSIVE_INGRESSES = _gauge(
    _CONTROLLER,
    "baton_unresponsive_ingresses",
    "Ingresses without a report last tick.",
    formerly="baton_silent_ingresses",
)

# ------------------------------------------------------------------- controller: objectives, cost
SLO_TARGET = _gauge(_CONTROLLER, "baton_slo_target_fraction", "Target attainment.", Label.SLO_CLASS)
SLO_OBJECTIVE = _gauge(
    _CONTROLLER, "baton_slo_objective_seconds", "Objectives.", Label.SLO_CLASS, Label.OBJECTIVE
)
SLO_ATTAINMENT = _gauge(
    _CONTROLLER,
    "baton_slo_attainment_fraction",
    "Attainment; `recent`: the last half minute.",
    Label.SLO_CLASS,
    Label.WINDOW,
)
SLO_BUDGET = _gauge(
    _CONTROLLER,
    "baton_slo_error_budget_fraction",
    "Error budget left; below 0: overspent.",
    Label.SLO_CLASS,
)
GPU_SECONDS = _counter(
    _CONTROLLER,
    "baton_gpu_seconds_total",
    "Device time of tenants' requests.",
    Label.TENANT,
    Label.POOL,
)
PAID_GPU_SECONDS = _counter(
    _CONTROLLER,
    "baton_paid_gpu_seconds_total",
    "Device time of replicas, used or idle.",
    Label.POOL,
)
COST = _counter(_CONTROLLER, "baton_cost_total", "Cost, including idle and overhead.", Label.TENANT)

# ------------------------------------------------------------------- controller: itself
CONFIG_GENERATION = _gauge(
    _CONTROLLER, "baton_config_generation", "Configuration generation in use."
)
INGRESS_GENERATION = _gauge(
    _INGRESS, "baton_ingress_config_generation", "Configuration generation in use."
)
CONFIG_REJECTED = _counter(
    _CONTROLLER,
    "baton_config_rejected_total",
    "Rejected configurations.",
    formerly="baton_config_refused_total",
)
BUILD_INFO = _gauge(_CONTROLLER, "baton_build_info", "Always 1.", Label.VERSION, Label.MODEL)
CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
BY_NAME: Final = {metric.name: metric for metric in CATALOGUE}
