"""The controller's deployment: metrics, quotas, adapters, console."""
