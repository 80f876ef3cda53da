"""Keys and stop reasons that an engine process and its adapter share, for transfers and resumes.

Separate from the connector, so that importing the keys does not load vLLM's connectors.
"""

from __future__ import annotations

from baton.domain.request import FinishReason

CONNECTOR = "NixlConnector"
CONNECTOR_MODULE = "baton.engine.vllm.patches.connector"
PREFIX_TOKENS_KEY = "baton_prefix_tokens"
"""In a decode leg's `kv_transfer_params`: how many leading tokens the KV handle covers."""

# Keys of the connector's statistics: lists with one entry per occurrence.
TRANSFERS_KEY = "bytes_transferred"
DURATIONS_KEY = "transfer_duration"
SOURCES_KEY = "baton_sources"
"""Engine ids, one for each entry of `TRANSFERS_KEY`."""
FAILED_SOURCES_KEY = "baton_failed_sources"
"""Engine ids, one for each failed pull."""
INVALIDATED_SOURCES_KEY = "baton_void_sources"
"""Engine ids, one for each request whose source had freed blocks before they were read."""

# In `kv_connector_extra_config`.
MAX_PULLS_KEY = "baton_max_pulls"
PULL_DEADLINE_KEY = "baton_pull_deadline_s"
STOP_REASON_MARKS = {
    FinishReason.INVALID: "baton-invalid: ",
    FinishReason.REJECTED: "baton-refused: ",
}
"""The first words of the stop reason of each such end."""
RESUMED_TOKENS_ARG = "baton_resumed_tokens"
"""In a request's extra arguments: how many of the last tokens of its prompt were generated."""
RESUMED_IDS_ARG = "baton_resumed_ids"
"""In those of a resumed request, for its grammar and its worker: the ids of these tokens."""
RESUME_ARGS = frozenset({RESUMED_TOKENS_ARG, RESUMED_IDS_ARG})
RESUME_SUPPORT_CALL = "baton_takes_up"
"""The control call that says whether an engine, with all its workers, supports resume."""


def parse_stop_reason(stop_reason: object) -> tuple[FinishReason, str] | None:
    """The end that a stop reason encodes, and why; None for any other stop reason."""
    if isinstance(stop_reason, str):
        for finish, mark in STOP_REASON_MARKS.items():
            if stop_reason.startswith(mark):
                return finish, stop_reason.removeprefix(mark)
    return None
