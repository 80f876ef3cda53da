"""Verbs that say why something was decided, and where time went."""
