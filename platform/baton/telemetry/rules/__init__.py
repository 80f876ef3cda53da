"""Recording and alert rules for Prometheus, made from the catalogue of metrics."""

from baton.telemetry.rules.render import files

__all__ = ["files"]
