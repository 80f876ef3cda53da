"""Who sends requests, and what they got."""
