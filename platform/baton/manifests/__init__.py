"""Manifests for clusters and machines, all rendered from the one configuration."""
