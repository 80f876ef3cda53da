"""Ray Serve: the composition root and its deployments."""
