"""The ingress' deployment: API server, coordinator, links to replicas."""
