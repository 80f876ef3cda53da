"""vLLM's EngineCore messages to and from baton's values."""
