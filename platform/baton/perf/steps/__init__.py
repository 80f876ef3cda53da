"""Duration of one engine step."""
