"""Errors of the performance model against published measurements."""
