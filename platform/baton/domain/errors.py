"""The error tree.

    BatonError
    ├── Rejected             refused with nothing sent: come back after `retry_after_s`
    │   ├── QueueFull        the bounded queue is full
    │   ├── NoCapacity       no replica can take the request
    │   ├── SloUnattainable  it could not be served within the objectives of its class
    │   ├── RateLimited      its tenant has used up what it may use for now
    │   ├── RetryBudgetExhausted it failed, and so do too many for it to be tried again
    │   └── Evicted          taken out of the queue: it waited past its deadline
    ├── EngineFailed         an engine could not go on and no other could take over
    │   └── NotResumable     tokens had reached the client; generation cannot be carried over
    ├── RequestInvalid       an engine refuses the request itself, as every other would
    ├── PromptTooLong        longer than this deployment accepts
    ├── NotAllowed           asked for what its tenant may not have
    ├── DeadlineExceeded     the request's own time limit ran out
    ├── EngineDied           the engine of a replica is dead
    ├── ComponentUnhealthy   a part of a deployment lives and cannot do its work
    ├── AdapterFailed        a LoRA adapter cannot be loaded
    ├── LegInvalid           an engine refuses a leg for what its request asks for
    ├── LinkFailed           a fleet link refused a frame or is down
    ├── TransferFailed       KV blocks cannot be fetched from a replica
    │   └── RdmaMissing      they would take a way that the deployment does not allow
    ├── OperatorError        the operator can correct it: `remedy` says how
    │   ├── ClusterFailed    the Ray cluster could not be started or joined
    │   ├── EngineStartFailed an engine could not be started
    │   ├── RoleUnsupported  a replica cannot play the role of its order
    │   ├── ScalingRejected  a pool cannot have as many replicas as ordered, or there is none
    │   ├── ApplyRejected    a configuration cannot hold in a deployment that runs
    │   ├── NotRunning       there is no deployment where one was looked for
    │   │   ├── AmbiguousDeployment there are several, and none was named
    │   │   └── DeploymentEnded one that was joined is there no more
    │   ├── TimedOut         an operator's command did not finish in its time
    │   ├── UnknownRequest   no ingress remembers the request that was asked about
    │   ├── UnknownModel     the shape of a model is unknown
    │   ├── UnknownAccelerator an accelerator is in no data sheet here
    │   └── InsufficientMemory a model, its activations and its KV cache need more memory
    ├── TraceInvalid         a line of a trace cannot be read
    ├── ConfigInvalid        the configuration cannot be used
    └── PreflightFailed      the machine or the cluster cannot run the configuration

Arguments are positional because Ray pickles exceptions by `args`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from baton.domain.names.retry_after import retry_after_text


class Cause(StrEnum):
    """Why a request was refused or failed, in a word (a metric label, hence an enum)."""

    QUEUE_FULL = "queue_full"
    NO_CAPACITY = "no_capacity"
    SLO_UNATTAINABLE = "slo_unattainable"
    RATE_LIMITED = "rate_limited"
    EVICTED = "evicted"
    RETRY_BUDGET_EXHAUSTED = "retry_budget_exhausted"
    ENGINE_FAILED = "engine_failed"
    NOT_RESUMABLE = "not_resumable"
    PROMPT_TOO_LONG = "prompt_too_long"
    INVALID_REQUEST = "invalid_request"
    """An engine refused the request itself."""
    NOT_ALLOWED = "not_allowed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CLIENT_DISCONNECTED = "client_disconnected"
    """Its client went away, which is no error of baton."""
    OTHER = "other"


class BatonError(Exception):
    """The root. `retryable` says whether the same request may succeed if sent again.

    `is_client_error` says that its client or tenant caused the rejection. No fleet would have
    served it, so it is no sign that this fleet is too small.
    """

    retryable: ClassVar[bool] = False
    is_client_error: ClassVar[bool] = False
    cause: ClassVar[Cause] = Cause.OTHER
    http_status: ClassVar[int] = 500


class Rejected(BatonError):
    """Refused, before any work was done but for `RetryBudgetExhausted`.

    Its client has got nothing.
    """

    retryable = True
    http_status = 503

    def __init__(self, request_id: str, retry_after_s: float, reason: str) -> None:
        super().__init__(request_id, retry_after_s, reason)
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.reason = reason

    def __str__(self) -> str:
        retry = retry_after_text(self.retry_after_s)
        return f"request {self.request_id} refused: {self.reason}; {retry}"


class QueueFull(Rejected):
    """The bounded queue is full."""

    cause = Cause.QUEUE_FULL
    http_status = 429


class NoCapacity(Rejected):
    """No replica can take the request."""

    cause = Cause.NO_CAPACITY


class SloUnattainable(Rejected):
    """It cannot meet the objectives of its class: an early rejection beats a late answer."""

    cause = Cause.SLO_UNATTAINABLE
    http_status = 429


class RateLimited(Rejected):
    """Its tenant has used up what it may use for now."""

    cause = Cause.RATE_LIMITED
    is_client_error = True
    http_status = 429


class RetryBudgetExhausted(Rejected):
    """It failed before its first token, and so do too many for it to be tried again."""

    cause = Cause.RETRY_BUDGET_EXHAUSTED


class Evicted(Rejected):
    """Waited in the queue past its deadline."""

    cause = Cause.EVICTED


class _RequestFailed(BatonError):
    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(request_id, reason)
        self.request_id = request_id
        self.reason = reason

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"


class EngineFailed(_RequestFailed):
    """An engine could not go on and no other could take over."""

    cause = Cause.ENGINE_FAILED
    retryable = True


class NotResumable(EngineFailed):
    """Tokens had reached the client and generation cannot be carried over to another engine."""

    cause = Cause.NOT_RESUMABLE


class PromptTooLong(_RequestFailed):
    """The prompt is longer than this deployment accepts."""

    cause = Cause.PROMPT_TOO_LONG
    is_client_error = True
    http_status = 400


class RequestInvalid(_RequestFailed):
    """An engine refuses the request itself: every engine would, and none has failed."""

    cause = Cause.INVALID_REQUEST
    is_client_error = True
    http_status = 400


class NotAllowed(_RequestFailed):
    """It asked for something that its tenant may not have."""

    cause = Cause.NOT_ALLOWED
    is_client_error = True
    http_status = 403


class DeadlineExceeded(_RequestFailed):
    """The request's own time limit ran out."""

    cause = Cause.DEADLINE_EXCEEDED
    http_status = 504


class _ReplicaError(BatonError):
    retryable = True

    def __init__(self, replica_id: str, reason: str) -> None:
        super().__init__(replica_id, reason)
        self.replica_id = replica_id
        self.reason = reason


class EngineDied(_ReplicaError):
    """The engine of a replica is dead; its requests go on elsewhere."""

    def __str__(self) -> str:
        return f"the engine of replica {self.replica_id} died: {self.reason}"


class ComponentUnhealthy(BatonError):
    """A part of a deployment lives and cannot do its work: Ray Serve is to replace it."""

    def __init__(self, component: str, reason: str) -> None:
        super().__init__(component, reason)
        self.component = component
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.component} is broken and has to be replaced: {self.reason}"


class AdapterFailed(BatonError):
    """A LoRA adapter cannot be loaded; legs without it are not concerned."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"adapter {self.name}: {self.reason}"


class LegInvalid(BatonError):
    """An engine refuses a leg because of its request; any engine of its model would."""

    def __init__(self, leg_id: str, reason: str) -> None:
        super().__init__(leg_id, reason)
        self.leg_id = leg_id
        self.reason = reason

    def __str__(self) -> str:
        return f"leg {self.leg_id}: {self.reason}"


def prompt_too_long_message(prompt_tokens: int, max_len_tokens: int) -> str:
    """Why an engine does not take a prompt: there must be room for a token behind it."""
    return f"the prompt has {prompt_tokens} tokens, expected fewer than {max_len_tokens}"


class LinkFailed(_ReplicaError):
    """A fleet link refused a frame or is down."""

    def __str__(self) -> str:
        return f"link to replica {self.replica_id}: {self.reason}"


class TransferFailed(_ReplicaError):
    """KV blocks cannot be fetched from a replica; the engine computes them instead."""

    def __str__(self) -> str:
        return f"KV blocks cannot be fetched from replica {self.replica_id}: {self.reason}"


class RdmaMissing(TransferFailed):
    """They would take a way that the deployment does not allow: it requires RDMA."""


class OperatorError(BatonError):
    """An error that an operator can correct; `remedy` says how."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class ClusterFailed(OperatorError):
    """The Ray cluster could not be started or joined."""


class EngineStartFailed(OperatorError):
    """An engine could not be started."""


class RoleUnsupported(OperatorError):
    """A replica cannot play the role of its order, or there is no such role."""

    http_status = 409


class ScalingRejected(OperatorError):
    """A pool cannot have as many replicas as ordered, or there is no such pool."""

    http_status = 400


class ApplyRejected(OperatorError):
    """A configuration cannot apply to the running deployment; the previous configuration stays."""


class NotRunning(OperatorError):
    """No deployment answers where one was looked for."""

    retryable = True
    http_status = 503


class AmbiguousDeployment(NotRunning):
    """More than one deployment runs here, and none was named."""

    retryable = False


class DeploymentEnded(NotRunning):
    """The joined deployment is gone for good; asking again does not help."""

    retryable = False


class TimedOut(OperatorError):
    """An operator's command did not finish in its time."""

    retryable = True
    http_status = 504


class UnknownRequest(OperatorError):
    """No ingress remembers the request that an operator asked about."""

    http_status = 404


class UnknownModel(OperatorError):
    """The shape of a model is unknown: its name is not known, or its config says too little."""


class UnknownAccelerator(OperatorError):
    """An accelerator is in none of the data sheets that are known."""


class InsufficientMemory(OperatorError):
    """A model does not fit the memory of the devices that are to run it.

    `term` is what overflows, `excess_bytes` by how much on each device, and `min_parallelism` the
    fewest devices, as tensor and pipeline parallelism, that would hold it; None when none was
    found.
    """

    def __init__(
        self,
        reason: str,
        remedy: str,
        term: str,
        excess_bytes: float,
        min_parallelism: tuple[int, int] | None,
    ) -> None:
        super().__init__(reason, remedy)
        self.args = (reason, remedy, term, excess_bytes, min_parallelism)
        self.term = term
        self.excess_bytes = excess_bytes
        self.min_parallelism = min_parallelism


class TraceInvalid(BatonError):
    """A line of a trace cannot be read, or the trace as a whole cannot be used (line 0)."""

    http_status = 400

    def __init__(self, name: str, line: int, problem: str) -> None:
        super().__init__(name, line, problem)
        self.name = name
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        location = f"{self.name}, line {self.line}" if self.line else self.name
        return f"{location}: {self.problem}"


class _ProblemsFound(BatonError):
    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class ConfigInvalid(_ProblemsFound):
    """The configuration cannot be used; one finding a line, all of them at once."""

    http_status = 400


class PreflightFailed(_ProblemsFound):
    """The machine or the cluster cannot run this configuration; one finding a line."""
