"""Pools by role, and replicas that change theirs."""
