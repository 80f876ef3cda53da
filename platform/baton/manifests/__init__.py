"""Manifests for clusters and machines, rendered from the configuration."""
