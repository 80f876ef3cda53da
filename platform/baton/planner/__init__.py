"""Searches shapes and pool sizes with the performance model and the simulator."""
