"""Prompts from datasets and from random words."""
