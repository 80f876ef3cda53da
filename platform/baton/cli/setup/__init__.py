"""Verbs that write and check files."""
