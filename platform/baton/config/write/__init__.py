"""Writes configurations as YAML, and the schema as JSON Schema."""
