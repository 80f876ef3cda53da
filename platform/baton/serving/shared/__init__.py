"""Names and values that several deployments use."""
