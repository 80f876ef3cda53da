"""Admission of requests, by objectives and rate limits."""
