"""Verbs that calculate: what fits, what a fleet carries, which fleet to take."""
