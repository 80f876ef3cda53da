"""The words in which an engine process and its adapter speak about transfers.

Apart from the connector, so that who only needs the words does not load vLLM's connectors.
"""

from __future__ import annotations

CONNECTOR = "NixlConnector"
CONNECTOR_MODULE = "baton.engine.vllm.connector"

PREFIX_TOKENS_KEY = "baton_prefix_tokens"
"""In a decode leg's `kv_transfer_params`: how many leading tokens the ticket covers."""

# Keys of the connector's statistics: lists with one entry for each occurrence.
TRANSFERS_KEY = "bytes_transferred"
DURATIONS_KEY = "transfer_duration"
SOURCES_KEY = "baton_sources"
"""Engine ids, one for each entry of `TRANSFERS_KEY`."""
FAILED_SOURCES_KEY = "baton_failed_sources"
"""Engine ids, one for each failure to pull for a request."""
