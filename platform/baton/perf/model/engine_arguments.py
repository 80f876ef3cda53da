"""vLLM's engine arguments that have no effect on the model of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ONLY_COUNTED = "tokens are counted, whichever they are"

IRRELEVANT_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "seed": _ONLY_COUNTED,
        "tokenizer": _ONLY_COUNTED,
        "tokenizer_mode": _ONLY_COUNTED,
        "skip_tokenizer_init": _ONLY_COUNTED,
        "trust_remote_code": "the model's shape says it all",
        "download_dir": "nothing is loaded",
        "hf_token": "nothing is loaded",
        "served_model_name": "a name",
        "disable_log_stats": "it costs no time that shows",
        "disable_log_requests": "it costs no time that shows",
        "enable_log_requests": "it costs no time that shows",
    }
)
"""By name, the reason."""
