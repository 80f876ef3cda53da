"""The scaling loop."""
