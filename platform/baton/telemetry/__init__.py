"""The metrics catalogue, exporters, tracing and logs."""
