"""Changes of vLLM's own classes, and the check of each before it is made."""
