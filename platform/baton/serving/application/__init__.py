"""From a configuration to a Ray Serve application."""
