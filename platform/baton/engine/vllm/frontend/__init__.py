"""vLLM's API server with the fleet as its engine."""
