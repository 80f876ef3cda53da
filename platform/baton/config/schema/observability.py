"""Keys of logs, metrics, traces and the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar

from baton.config.language.scalars import Bounds
from baton.telemetry.logs import LogFormat

_Share = Bounds(low=0, high=1)


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsConfig:
    """Logs."""

    NOT_YET: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"prompts": "prompts are never logged, remove it"}
    )

    format: LogFormat = LogFormat.JSON
    level: LogLevel = LogLevel.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Metrics for Prometheus: the controller's endpoint, which also lists all other targets."""

    enabled: bool = True
    """Whether metrics are counted and served."""
    host: str = "127.0.0.1"
    """Address of the controller's endpoint."""
    port: Annotated[int, Bounds(low=0, high=65535)] = 9400
    """Port of the controller's endpoint; 0: any free port, see `baton status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Traces of requests, and their destination."""

    otlp: str | None = None
    """URL of an OpenTelemetry collector, as `http://collector:4318`, without a name or a password;
    null: no traces."""
    sample: Annotated[float, _Share] = 0.01
    """Share of requests that are traced, in addition to requests whose caller asks for a trace."""
    keep_slo_misses: bool = True
    """Whether requests that missed an objective are always traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """The live page, on the port of the metrics."""

    enabled: bool = True
    """Whether it is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Logs, metrics, traces and console."""

    logs: LogsConfig = field(default_factory=LogsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    token_file: str | None = None
    """File with the token of metrics and console, sent as bearer token or as password; null: no
    token. Required when `metrics.host` is not a loopback address."""
