"""Checks before anything is started."""
