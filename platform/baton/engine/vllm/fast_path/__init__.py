"""Shorter ways through vLLM's API server."""
