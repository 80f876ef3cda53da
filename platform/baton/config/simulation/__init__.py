"""Simulates a configured deployment in virtual time."""
