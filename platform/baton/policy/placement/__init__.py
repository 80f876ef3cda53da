"""Placement: which replicas run a request, by predicted cost."""
