"""The state of one request and the limits that hold for it."""
