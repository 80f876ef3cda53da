"""One YAML file becomes one frozen configuration: layers, checks, schema."""
