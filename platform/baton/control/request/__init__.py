"""A request from its arrival to its end: dispatch, legs, retries, draining."""
