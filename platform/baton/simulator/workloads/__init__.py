"""Workloads of a fleet: recorded traces, and generators."""
