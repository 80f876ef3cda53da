"""Prompts out of datasets, traces and made-up words."""
