"""Every metric of baton, declared once: its name, kind, unit, labels and meaning.

*Theory of operation.* Collectors, dashboards, alert rules and docs name metrics by these values and
by nothing else, so that a metric that is renamed here is renamed everywhere, or a test fails. Three
kinds of process expose them, each its own, and a scrape adds to each target (`serving`'s service
discovery) the labels `component`, `pool` and `replica`; metrics do not repeat those.

Names are `baton_<noun>_<unit>[_total]`, in seconds, bytes and tokens. Values of labels come from
enumerations, from the configuration (classes, tenants, models, pools) or from the fleet (replicas),
each of which is bounded; what is beyond `MOST_VALUES` of a label is counted together under `OTHER`.
Nothing is counted per token for each request: counters are read from totals that are kept anyway,
histograms observe once a request, gaps between tokens once an engine step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OTHER: Final = "other"
"""Values of a label for which there is no room left."""
MOST_VALUES: Final = 256
"""Different values of one label of one metric in one process."""


class Kind(StrEnum):
    """What a metric's value does."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Component(StrEnum):
    """Which process exposes a metric; the label `component` of its target."""

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
    """How a request ended: `domain.request.Phase` of those that are ends, or `barred`; of
    admissions, see `domain.demand.AdmissionOutcome`."""
    OBJECTIVE = "objective"
    """See `Objective`."""
    PART = "part"
    """See `telemetry.waterfall.Part`."""
    REASON = "reason"
    """Of admissions: `domain.demand.WayIn` or `domain.errors.Cause`; of placements:
    `domain.handoff.RouteReason`."""
    MODE = "mode"
    PHASE = "phase"
    TOKENS = "tokens"
    """See `TokenKind`."""
    SOURCE = "source"
    TARGET = "target"
    """Replicas: where blocks come from, and where they go."""
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
    """Which edges a histogram's buckets have: a digest of them, the same for the same edges. Counts
    of different edges are never added up."""


class Objective(StrEnum):
    """What a judged request met."""

    GOODPUT = "goodput"
    """All of it."""
    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"


class TokenKind(StrEnum):
    """Tokens of requests, by what they cost."""

    PROMPT = "prompt"
    CACHED = "cached"
    """Of the prompt's, those that no engine had to compute."""
    OUTPUT = "output"


class Deadline(StrEnum):
    """A timeout that bounds what a histogram observes, by its key in the configuration."""

    QUEUE_WAIT = "admission.max_queue_wait"
    FIRST_TOKEN = "admission.timeouts.first_token"  # noqa: S105 - a key of the configuration
    STALL = "admission.timeouts.stall"
    RESUME = "admission.timeouts.resume"
    TOTAL = "admission.timeouts.total"
    TRANSFER = "transfer.deadline"
    LEASE = "transfer.lease"


LONGEST_WAIT_S: Final = 86_400.0
"""The longest timeout and the longest objective that a configuration may have (`config.bounds`)."""
# In steps of two to five, for what is slow: two minutes or four is all that one asks then.
_SLOW_EDGES_S: Final = (
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 7_200.0, LONGEST_WAIT_S,
)  # fmt: skip
# OpenTelemetry's advice for `gen_ai.server.*`, and on to the longest timeout that there may be.
# Every process has these edges; those that follow its configuration are added (`telemetry.edges`).
# Source: OpenTelemetry semantic conventions, Generative AI metrics.
TTFT_EDGES_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    *_SLOW_EDGES_S,
)  # fmt: skip
TPOT_EDGES_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, *_SLOW_EDGES_S,
)  # fmt: skip
DURATION_EDGES_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 600.0, 1_800.0, 7_200.0, LONGEST_WAIT_S,
)  # fmt: skip
GAP_EDGES_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
    *_SLOW_EDGES_S,
)  # fmt: skip
# No deadline bounds how wrong a prediction is. Beyond ten times either way it is just wrong.
RATIO_EDGES: Final = (
    0.05, 0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 20.0, 100.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """As a query writes it: counters with `_total`, histograms without `_bucket`."""
    kind: Kind
    component: Component
    help: str
    labels: tuple[Label, ...] = ()
    edges: tuple[float, ...] = ()
    """Of a histogram, without those that follow the configuration."""
    objective: Objective | None = None
    """Of a histogram: it has an edge at each class's."""
    deadlines: tuple[Deadline, ...] = ()
    """Of a histogram: the timeouts that bound what it observes; it has an edge at each."""


def _counter(where: Component, name: str, text: str, *labels: Label) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, component=where, help=text, labels=labels)


def _gauge(where: Component, name: str, text: str, *labels: Label) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, component=where, help=text, labels=labels)


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


_IN, _RE, _CO = Component.INGRESS, Component.REPLICA, Component.CONTROLLER
_WHOSE = (Label.SLO_CLASS, Label.TENANT, Label.MODEL, Label.POOL)
_WHICH = (Label.SLO_CLASS, Label.MODEL, Label.POOL)
# A stream goes on elsewhere when its replica stalls or is lost: it waits for a place, then for a
# token. Where the first token comes early, a handoff is a gap, too.
_BETWEEN_TOKENS = (
    Deadline.STALL,
    Deadline.RESUME,
    Deadline.FIRST_TOKEN,
    Deadline.TRANSFER,
    Deadline.TOTAL,
)

# ------------------------------------------------------------------- ingress: what clients got
REQUESTS = _counter(
    _IN, "baton_requests_total", "Requests that have ended, by how.", *_WHOSE, Label.OUTCOME
)
SLO_REQUESTS = _counter(
    _IN, "baton_slo_requests_total", "Judged requests: what attainment is a share of.", *_WHOSE
)
SLO_GOOD = _counter(
    _IN,
    "baton_slo_good_requests_total",
    "Judged requests that met an objective; `goodput` is all of them at once.",
    *_WHOSE,
    Label.OBJECTIVE,
)
SLO_EXCUSED = _counter(
    _IN, "baton_slo_excused_requests_total", "Left before anything was due to them.", *_WHOSE
)
TOKENS = _counter(
    _IN, "baton_tokens_total", "Tokens of ended requests, by what they cost.", *_WHOSE, Label.TOKENS
)
TTFT = _histogram(
    "baton_time_to_first_token_seconds",
    "From arrival to the first token.",
    TTFT_EDGES_S,
    *_WHICH,
    objective=Objective.TTFT,
    deadlines=(Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
TPOT = _histogram(
    "baton_time_per_output_token_seconds",
    "Between tokens, on average over a request.",
    TPOT_EDGES_S,
    *_WHICH,
    objective=Objective.TPOT,
    deadlines=_BETWEEN_TOKENS,
)
WORST_GAP = _histogram(
    "baton_worst_token_gap_seconds",
    "The longest time between two tokens of a request.",
    GAP_EDGES_S,
    *_WHICH,
    objective=Objective.ITL,
    deadlines=_BETWEEN_TOKENS,
)
ITL = _histogram(
    "baton_inter_token_seconds",
    "Between two tokens of a stream; observed once an engine step, for all of its streams.",
    GAP_EDGES_S,
    Label.POOL,
    objective=Objective.ITL,
    deadlines=(Deadline.STALL, Deadline.TOTAL),
)
DURATION = _histogram(
    "baton_request_duration_seconds",
    "From arrival to the end, of finished requests.",
    DURATION_EDGES_S,
    *_WHICH,
    deadlines=(Deadline.TOTAL,),
)
HELD = _histogram(
    "baton_held_seconds",
    "Held at the ingress before the first placement.",
    DURATION_EDGES_S,
    *_WHICH,
    objective=Objective.TTFT,
    deadlines=(Deadline.QUEUE_WAIT, Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
HANDOFF_GAP = _histogram(
    "baton_handoff_gap_seconds",
    "From the end of prefill to the first token, of requests that were handed off.",
    TTFT_EDGES_S,
    *_WHICH,
    deadlines=(Deadline.TRANSFER, Deadline.LEASE, Deadline.FIRST_TOKEN, Deadline.TOTAL),
)
TTFT_PARTS = _counter(
    _IN,
    "baton_ttft_part_seconds_total",
    "Where the time to first token went, added up over requests.",
    *_WHICH,
    Label.PART,
)
# ------------------------------------------------------------------- ingress: admission and routes
ADMISSIONS = _counter(
    _IN,
    "baton_admissions_total",
    "What became of requests at the door: admitted at once or after a wait, or why refused.",
    Label.SLO_CLASS,
    Label.OUTCOME,
    Label.REASON,
)
IN_FLIGHT = _gauge(_IN, "baton_in_flight_requests", "Requests under way, by phase.", Label.PHASE)
HELD_REQUESTS = _gauge(_IN, "baton_held_requests", "Requests that wait at the ingress.")
SLACK = _gauge(_IN, "baton_ttft_slack_seconds", "What the most urgent request has left.")
PLACEMENTS = _counter(
    _IN,
    "baton_placements_total",
    "Placements of ended requests, by mode and why.",
    Label.MODE,
    Label.REASON,
)
RESUMES = _counter(_IN, "baton_resumes_total", "Streams that went on elsewhere.")
SECOND_TRIES = _counter(
    _IN,
    "baton_second_tries_total",
    "Requests tried again on another replica, by what was wrong with the first.",
    Label.REASON,
)
SECOND_TRIES_REFUSED = _counter(
    _IN,
    "baton_second_tries_refused_total",
    "Requests that failed and were not tried again, since too many were lately.",
)
CIRCUITS = _gauge(
    _IN,
    "baton_circuits",
    "Replicas by how far this ingress trusts them: closed, open, or half_open, on trial.",
    Label.POOL,
    Label.STATE,
)
TTFT_RATIO = _histogram(
    "baton_ttft_prediction_ratio",
    "Predicted over actual time to first token; above 1 the prediction was too long.",
    RATIO_EDGES,
    Label.MODE,
    Label.MODEL,
)
STEP_ERROR = _gauge(
    _IN, "baton_step_time_error_fraction", "Mean error of predicted step times.", Label.POOL
)
HIT_TOKENS = _counter(
    _IN,
    "baton_predicted_hit_tokens_total",
    "Prompt tokens that placement expected to be cached where it placed them.",
)
INDEX_BLOCKS = _gauge(
    _IN,
    "baton_prefix_index_blocks",
    "Blocks that the prefix index knows of, by how it knows.",
    Label.SOURCE,
)
# ------------------------------------------------------------------- ingress: links and leases
LINK_PAIRS = _gauge(_IN, "baton_link_pairs", "Pairs of replicas, by state.", Label.STATE)
LINK_BANDWIDTH = _gauge(
    _IN,
    "baton_link_bandwidth_bytes_per_second",
    "Estimated bandwidth of a pair of replicas.",
    Label.SOURCE,
    Label.TARGET,
    Label.TRANSPORT,
)
LINK_SETUP = _gauge(
    _IN,
    "baton_link_setup_seconds",
    "What a pull over a pair takes besides its bytes.",
    Label.SOURCE,
    Label.TARGET,
)
LINK_QUARANTINED = _gauge(
    _IN,
    "baton_link_quarantined",
    "1 for each pair that is not used because probing or pulling over it fails.",
    Label.SOURCE,
    Label.TARGET,
)
AGENT_BROKEN = _gauge(
    _IN,
    "baton_agent_broken",
    "1 for each replica whose pulls fail from all sources though they serve others.",
    Label.TARGET,
)
BROKEN_HANDOFFS = _counter(
    _IN, "baton_broken_handoffs_total", "Handoffs that did not arrive, by pair's target.",
    Label.TARGET,
)  # fmt: skip
LEASES = _gauge(_IN, "baton_leases", "Leases on KV blocks that wait to be pulled.", Label.POOL)
UNJOINED = _gauge(
    _IN, "baton_unjoined_replicas", "Replicas that Ray knows and this ingress cannot reach."
)
# ------------------------------------------------------------------- replicas
REPLICA_INFO = _gauge(
    _RE,
    "baton_replica_info",
    "1; what the replica is.",
    Label.ROLE,
    Label.MODEL,
    Label.ENGINE,
    Label.VERSION,
)
STEPS = _counter(_RE, "baton_engine_steps_total", "Engine steps, by what they did.", Label.PHASE)
BUSY = _counter(_RE, "baton_engine_busy_seconds_total", "Time in engine steps.")
COMPUTED = _counter(
    _RE, "baton_engine_tokens_total", "Tokens that the engine computed.", Label.PHASE
)
RUNNING = _gauge(_RE, "baton_engine_requests", "Requests in the engine, by state.", Label.STATE)
QUEUED_TOKENS = _gauge(_RE, "baton_engine_queued_tokens", "Prompt tokens that wait.")
KV_USED = _gauge(_RE, "baton_engine_kv_used_fraction", "Of the KV cache.")
STEP_TIME = _gauge(_RE, "baton_engine_step_seconds", "Moving average of the engine's step time.")
PULLS = _counter(
    _RE, "baton_transfer_pulls_total", "Pulls of KV blocks into here.", Label.SOURCE,
    Label.TRANSPORT,
)  # fmt: skip
PULLED = _counter(
    _RE, "baton_transfer_bytes_total", "Bytes pulled into here.", Label.SOURCE, Label.TRANSPORT
)
PULL_TIME = _counter(
    _RE, "baton_transfer_seconds_total", "Time in pulls.", Label.SOURCE, Label.TRANSPORT
)
PULL_FAILURES = _counter(
    _RE, "baton_transfer_failures_total", "Pulls into here that failed.", Label.SOURCE
)
EXPIRED_LEASES = _counter(
    _RE, "baton_expired_leases_total", "Leases that nobody pulled or released in time."
)
VOID_PULLS = _counter(
    _RE,
    "baton_void_pulls_total",
    "Pulls into here whose source no longer kept the blocks when they had been read. They are"
    " thrown away: no token comes of them.",
)
ADAPTERS = _gauge(_RE, "baton_adapters_loaded", "LoRA adapters that are loaded, or soon will be.")
ADAPTER_HITS = _counter(
    _RE, "baton_adapter_hits_total", "Legs whose adapter was there, or on its way, when they came."
)
ADAPTER_LOADS = _counter(_RE, "baton_adapter_loads_total", "Adapters that were loaded for a leg.")
ADAPTER_TIME = _counter(
    _RE, "baton_adapter_load_seconds_total", "What that took; nothing else is computed meanwhile."
)
LIVE_LEGS = _gauge(_RE, "baton_live_legs", "Legs that run here, of all coordinators.")
HELD_LEASES = _gauge(_RE, "baton_held_leases", "Leases that this replica keeps blocks for.")
COORDINATORS = _gauge(_RE, "baton_coordinators", "Coordinators that are connected.")
LINK_FRAMES = _counter(
    _RE, "baton_link_frames_total", "Frames of the fleet link, by what became of them.", Label.STATE
)
LINK_STRANGERS = _counter(
    _RE, "baton_link_strangers_total", "Connections to the fleet link that were no coordinator's."
)
# ------------------------------------------------------------------- controller: pools
POOL_REPLICAS = _gauge(
    _CO, "baton_pool_replicas", "Replicas: want, ready, starting, draining.", Label.POOL,
    Label.STATE,
)  # fmt: skip
POOL_ROLES = _gauge(
    _CO, "baton_pool_role_replicas", "Ready replicas, by what they play.", Label.POOL, Label.ROLE
)
POOL_BOUNDS = _gauge(
    _CO, "baton_pool_bound_replicas", "How few and how many it may have.", Label.POOL, Label.BOUND
)
POOL_BUSY = _gauge(_CO, "baton_pool_busy_fraction", "Time in engine steps.", Label.POOL)
POOL_COLD_START = _gauge(
    _CO, "baton_pool_cold_start_seconds", "From asking for a replica to its first work.", Label.POOL
)
POOL_CAPACITY = _gauge(
    _CO,
    "baton_pool_capacity_tokens_per_second",
    "What one ready replica can do, by kind of token, as calibrated.",
    Label.POOL,
    Label.TOKENS,
)
POOL_PRICE = _gauge(_CO, "baton_pool_price_per_hour", "Of one replica.", Label.POOL)
# ------------------------------------------------------------------- controller: demand, scaling
DEMAND_REQUESTS = _gauge(_CO, "baton_demand_requests_per_second", "Asked for, over the window.")
DEMAND_TOKENS = _gauge(
    _CO,
    "baton_demand_tokens_per_second",
    "Asked for, over the window: uncached prompt tokens and output tokens.",
    Label.TOKENS,
)
SCALING_INPUT = _gauge(
    _CO,
    "baton_scaling_input",
    "Numbers that the last decision about a pool was made from; see `baton explain scale`.",
    Label.POOL,
    Label.INPUT,
)
SCALING_DECISIONS = _counter(
    _CO, "baton_scaling_decisions_total", "Ticks, by pool and why.", Label.POOL, Label.REASON
)
SCALING_ACTIONS = _counter(
    _CO,
    "baton_scaling_actions_total",
    "Replicas started, stopped and flipped.",
    Label.POOL,
    Label.ACTION,
)
SCALING_HELD = _gauge(
    _CO, "baton_scaling_held", "1 while the autoscaler holds still, for want of what it needs."
)
SCALING_TURNS = _counter(_CO, "baton_scaling_turns_total", "Turns of the loop, by how they ended.",
    Label.OUTCOME,
)  # fmt: skip
OVERRIDES = _gauge(_CO, "baton_overridden_pools", "Pools whose size an operator has set.")
REPORT_AGE = _gauge(
    _CO, "baton_report_age_seconds", "Since the last turn in which every ingress reported."
)
SILENT_INGRESSES = _gauge(_CO, "baton_silent_ingresses", "Those that did not report last turn.")
# ------------------------------------------------------------------- controller: promises, money
SLO_TARGET = _gauge(
    _CO, "baton_slo_target_fraction", "Share of requests that are to be good.", Label.SLO_CLASS
)
SLO_OBJECTIVE = _gauge(
    _CO, "baton_slo_objective_seconds", "What is promised.", Label.SLO_CLASS, Label.OBJECTIVE
)
SLO_ATTAINMENT = _gauge(
    _CO,
    "baton_slo_attainment_fraction",
    "Share that was good: lately, and over the target's own window.",
    Label.SLO_CLASS,
    Label.WINDOW,
)
SLO_BUDGET = _gauge(
    _CO,
    "baton_slo_error_budget_fraction",
    "What is left of the misses that the target allows over its window; below 0 it is broken.",
    Label.SLO_CLASS,
)
GPU_SECONDS = _counter(
    _CO, "baton_gpu_seconds_total", "Device time that tenants' requests took, by pool.",
    Label.TENANT, Label.POOL,
)  # fmt: skip
PAID_GPU_SECONDS = _counter(
    _CO, "baton_paid_gpu_seconds_total", "Device time of replicas, used or not.", Label.POOL
)
COST = _counter(
    _CO,
    "baton_cost_total",
    "What tenants used, at the pools' prices, in the configuration's currency; tenants together"
    " with what nobody used are what was paid.",
    Label.TENANT,
)
# ------------------------------------------------------------------- controller: itself
CONFIG_GENERATION = _gauge(
    _CO, "baton_config_generation", "Number of the configuration that holds."
)
INGRESS_GENERATION = _gauge(
    _IN, "baton_ingress_config_generation", "Number of the configuration that an ingress goes by."
)
CONFIG_REFUSED = _counter(
    _CO, "baton_config_refused_total", "Configurations that could not be taken."
)
BUILD_INFO = _gauge(_CO, "baton_build_info", "1; what runs.", Label.VERSION, Label.MODEL)

CATALOGUE: Final[tuple[Metric, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All of them, in order."""
BY_NAME: Final = {metric.name: metric for metric in CATALOGUE}
