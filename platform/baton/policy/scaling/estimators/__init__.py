"""Estimates of the next values from recent values."""
