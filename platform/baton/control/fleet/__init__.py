"""A coordinator's knowledge of replicas: facts, load, caches, health."""
