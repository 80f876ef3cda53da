"""Sans-I/O machines that turn events into commands: coordinator, leases, autoscaler, drain."""
