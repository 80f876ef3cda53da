"""The Ray cluster: start, join, watch, end."""
