"""A streaming client that measures the times of tokens."""
