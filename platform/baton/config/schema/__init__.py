"""Every key of a configuration."""
