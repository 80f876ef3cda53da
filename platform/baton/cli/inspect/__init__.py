"""Verbs that show how a deployment fares."""
