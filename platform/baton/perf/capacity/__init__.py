"""Capacity of a replica, and requests in a closed loop."""
