"""A streaming client that notes when tokens come."""
