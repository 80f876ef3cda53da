"""When virtual replicas say how they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingOptions:
    """When a replica says how it is."""

    report_interval_s: float = 0.25
    """Between two load reports; as the fleet link does it."""
    load_delay_s: float = 0.0
    """How much later than anything else load reports arrive."""
    cache_flush_interval_s: float = 0.02
    """How long cache changes are gathered before they are sent."""
    report_unchanged: bool = True
    """Report even if nothing has happened since the last time; the fleet link does now and then."""
    max_report_gap_s: float = float("inf")
    """Without `report_unchanged`: the longest that a replica says nothing."""
    report_cache: bool = True
    """Say what is cached."""
    max_step_run_s: float = 1.0
    """The longest jump of an engine: so old may the tokens be that a client has not been sent."""
