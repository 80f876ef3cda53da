"""The metrics that each process exports to Prometheus."""
