"""Verbs that start, change and end a deployment."""
