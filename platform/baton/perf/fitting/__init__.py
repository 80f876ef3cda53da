"""Fits of the performance model: to measurements, and to reports of running engines."""
