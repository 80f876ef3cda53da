"""Shapes of engines, and fleets of them."""
