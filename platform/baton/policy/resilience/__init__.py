"""When a replica is left alone, and when a request is tried again."""
