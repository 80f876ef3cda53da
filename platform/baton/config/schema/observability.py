"""The keys that say what can be seen from outside, and by whom."""

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
    """The least important events that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsConfig:
    """What is logged."""

    NOT_YET: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"prompts": "prompts are never logged, remove it"}
    )

    format: LogFormat = LogFormat.JSON
    level: LogLevel = LogLevel.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where Prometheus asks: the controller's endpoint, which also names every other target."""

    enabled: bool = True
    """Whether metrics are counted and served at all."""
    host: str = "127.0.0.1"
    """The address of the controller's endpoint."""
    port: Annotated[int, Bounds(low=0, high=65535)] = 9400
    """Of the controller's endpoint; 0: any that is free, see `baton status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Which requests leave a trace, and where it goes."""

    otlp: str | None = None
    """URL of an OpenTelemetry collector, as `http://collector:4318`, without a name or a password;
    null: nothing is traced."""
    sample: Annotated[float, _Share] = 0.01
    """The share of requests that is traced, besides those whose caller says so."""
    keep_slo_misses: bool = True
    """Whether requests are traced that missed an objective, whatever `sample` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """The live page, on the port of the metrics."""

    enabled: bool = True
    """Whether it is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """What can be seen from outside."""

    logs: LogsConfig = field(default_factory=LogsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    token_file: str | None = None
    """Holds the token that metrics and console ask for, as bearer token or as a password; null:
    none. Required where `metrics.host` is not this machine alone."""
