"""Configurations back to YAML, and the schema as JSON Schema."""
