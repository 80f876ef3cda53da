"""Ray Serve: the composition root and the deployments it wires together."""
