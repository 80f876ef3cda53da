"""The names by which a resumed leg is told to an engine; see `resume_patch`."""

from __future__ import annotations

RESUMED_TOKENS_ARG = "baton_resumed_tokens"
"""In a request's extra arguments: how many of the last tokens of its prompt were generated."""
RESUMED_IDS_ARG = "baton_resumed_ids"
"""In those of a request that was taken up, for its grammar and its worker: which tokens."""
RESUME_ARGS = frozenset({RESUMED_TOKENS_ARG, RESUMED_IDS_ARG})
RESUME_SUPPORT_CALL = "baton_takes_up"
"""The control call that says whether an engine, with all its workers, takes up."""
