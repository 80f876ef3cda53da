"""Replicas, ingresses and the network between them in virtual time."""
