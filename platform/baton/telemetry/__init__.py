"""Metrics, logs, traces, dashboards and alert rules."""
