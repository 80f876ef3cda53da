"""Whether a request is let in, by objectives and rate limits."""
