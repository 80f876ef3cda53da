"""What is changed in vLLM's own classes, and how each change proves itself."""
