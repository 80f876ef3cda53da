"""The ASGI layer in front of vLLM's app: routes, keys, limits and errors."""
