"""The words in which an engine process and its adapter speak about transfers.

Apart from the connector, so that who only needs the words does not load vLLM's connectors.
"""

from __future__ import annotations

CONNECTOR = "NixlConnector"
CONNECTOR_MODULE = "baton.engine.vllm.patches.connector"

PREFIX_TOKENS_KEY = "baton_prefix_tokens"
"""In a decode leg's `kv_transfer_params`: how many leading tokens the ticket covers."""

# Keys of the connector's statistics: lists with one entry for each occurrence.
TRANSFERS_KEY = "bytes_transferred"
DURATIONS_KEY = "transfer_duration"
SOURCES_KEY = "baton_sources"
"""Engine ids, one for each entry of `TRANSFERS_KEY`."""
FAILED_SOURCES_KEY = "baton_failed_sources"
"""Engine ids, one for each failure to pull for a request."""
INVALIDATED_SOURCES_KEY = "baton_void_sources"
"""Engine ids, one for each request whose blocks were read and no longer kept by their source."""

# The connector's own settings, in `kv_connector_extra_config`.
MAX_PULLS_KEY = "baton_max_pulls"
PULL_DEADLINE_KEY = "baton_pull_deadline_s"
