"""Verbs that send a load to an endpoint."""
