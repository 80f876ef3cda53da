"""vLLM's V1 scheduler on counts instead of tokens, many decode steps at once."""
