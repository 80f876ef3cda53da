"""Scaling: how many replicas of each role there should be, from observed and desired state."""
