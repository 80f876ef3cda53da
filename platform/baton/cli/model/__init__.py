"""Verbs that calculate: fit of a model, capacity of a fleet, choice of a fleet."""
