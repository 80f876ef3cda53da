"""`baton doctor`: faults and their remedies."""
