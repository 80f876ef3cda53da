"""Models: shapes, memory, and vLLM's defaults for these."""
