"""Timings learned from what engines report."""
