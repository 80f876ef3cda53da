"""Checks between keys."""
