"""Which of vLLM's engine arguments change nothing that is modelled of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TOKENS = "tokens are counted, whichever they are"

IRRELEVANT_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "seed": _TOKENS,
        "tokenizer": _TOKENS,
        "tokenizer_mode": _TOKENS,
        "skip_tokenizer_init": _TOKENS,
        "trust_remote_code": "the model's shape says it all",
        "download_dir": "nothing is loaded",
        "hf_token": "nothing is loaded",
        "served_model_name": "a name",
        "disable_log_stats": "it costs no time that shows",
        "disable_log_requests": "it costs no time that shows",
        "enable_log_requests": "it costs no time that shows",
    }
)
"""By name, why."""
