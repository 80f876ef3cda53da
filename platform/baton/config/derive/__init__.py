"""Derives options of other packages from a configuration."""
