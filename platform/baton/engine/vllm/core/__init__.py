"""A vLLM engine in a replica, behind `ports.Engine`."""
