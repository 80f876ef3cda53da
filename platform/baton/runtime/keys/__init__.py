"""API keys and the files they are kept in."""
