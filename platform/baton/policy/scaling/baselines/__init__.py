"""Scaling as others do it, from their published formulas, behind the same interface."""
