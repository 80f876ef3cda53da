"""The ASGI layer in front of vLLM's app: who may ask for what."""
