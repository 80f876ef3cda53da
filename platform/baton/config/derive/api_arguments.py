"""Arguments of vLLM's API server: which are allowed, their types, and why others are rejected.

The API server runs behind baton's front, without a listener and without an engine. Arguments for a
listener, more routes, keys or computation would have no effect, so only listed arguments are passed
on. A test compares the list with the installed vLLM.

Source: vLLM 0.32, entrypoints/launchers/cli_args.py and engine/arg_utils.py, and 0.33,
entrypoints/common/cli_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentType:
    """Valid values of an argument."""

    expected: str
    """For findings."""
    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    item_type: type | None = None
    """Type of each item of a list."""

    def problem(self, value: object) -> str | None:
        """The error of a value, or None."""
        is_valid = isinstance(value, self.types) and (
            bool in self.types or not isinstance(value, bool)
        )
        if is_valid and self.choices:
            is_valid = value in self.choices
        if is_valid and self.minimum is not None and isinstance(value, int | float):
            is_valid = value >= self.minimum
        if is_valid and self.item_type is not None and isinstance(value, Sequence):
            is_valid = isinstance(value, str) or all(
                isinstance(item, self.item_type) for item in value
            )
        return None if is_valid else f"got {_describe_value(value)}, expected {self.expected}"


def _describe_value(value: object) -> str:
    """A value of the wrong type, without text that may be a secret."""
    match value:
        case bool() | None:
            return str(value).lower().replace("none", "null")
        case int() | float():
            return str(value)
        case str():
            return "another text" if value else "an empty text"
        case list() | tuple():
            return "a list"
        case _:
            return "a mapping"


def _one_of(*choices: str) -> ArgumentType:
    return ArgumentType(expected=f"one of {', '.join(choices)}", types=(str,), choices=choices)


_FLAG = ArgumentType(expected="true or false", types=(bool,))
_TEXT = ArgumentType(expected="a text", types=(str,))
_NON_NEGATIVE = ArgumentType(expected="a whole number from 0 on", types=(int,), minimum=0)
_POSITIVE = ArgumentType(expected="a whole number from 1 on", types=(int,), minimum=1)
_MAPPING = ArgumentType(expected="a mapping", types=(Mapping,))
_TEXTS = ArgumentType(expected="a list of texts", types=(list, tuple), item_type=str)

MODEL_LOADING_ARGUMENTS = (
    "code_revision",
    "config_format",
    "download_dir",
    "hf_config_path",
    "hf_overrides",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
)
"""Arguments about reading a model, shared by engines and ingresses: given once, passed to both."""

ALLOWED_ARGUMENTS: Mapping[str, ArgumentType] = {
    # How requests become prompts.
    "chat_template": _TEXT,
    "chat_template_content_format": _one_of("auto", "openai", "string"),
    "default_chat_template_kwargs": _MAPPING,
    "trust_request_mm_kwargs": _FLAG,
    "exclude_tools_when_tool_choice_none": _FLAG,
    "cohere_format": _one_of("cmd3", "cmd4"),
    "anthropic_disabled_thinking_effort": _one_of(
        "auto", "none", "low", "medium", "high", "xhigh", "max"
    ),
    "renderer_num_workers": _POSITIVE,
    "tokenizer": _TEXT,
    "tokenizer_mode": _TEXT,
    "tokenizer_revision": _TEXT,
    # Reading the model: the API server reads only its configuration.
    "code_revision": _TEXT,
    "config_format": _TEXT,
    "download_dir": _TEXT,
    "dtype": _TEXT,
    "hf_config_path": _TEXT,
    "hf_overrides": _MAPPING,
    "quantization": _TEXT,
    "trust_remote_code": _FLAG,
    # Media in requests.
    "enable_mm_embeds": _FLAG,
    "interleave_mm_strings": _FLAG,
    "language_model_only": _FLAG,
    "limit_mm_per_prompt": _MAPPING,
    "media_io_kwargs": _MAPPING,
    "mm_processor_kwargs": _MAPPING,
    # Limits and defaults of requests.
    "generation_config": _TEXT,
    "override_generation_config": _MAPPING,
    "logits_processors": _TEXTS,
    "max_logprobs": ArgumentType(expected="a whole number from -1 on", types=(int,), minimum=-1),
    "structured_outputs_config": _MAPPING,
    # Tools and reasoning.
    "enable_auto_tool_choice": _FLAG,
    "tool_call_parser": _TEXT,
    "tool_parser_plugin": _TEXT,
    "tool_server": _TEXT,
    "tool_strict_level": _one_of("auto", "function", "parameter"),
    "reasoning_config": _MAPPING,
    "reasoning_effort_map": _MAPPING,
    "reasoning_parser": _TEXT,
    "reasoning_parser_plugin": _TEXT,
    # Form of answers.
    "enable_force_include_usage": _FLAG,
    "enable_prompt_tokens_details": _FLAG,
    "enable_request_id_headers": _FLAG,
    "fingerprint_mode": _one_of("full", "hash", "custom", "none"),
    "fingerprint_value": _TEXT,
    "response_role": _TEXT,
    "return_tokens_as_token_ids": _FLAG,
    "sse_keep_alive_interval": ArgumentType(
        expected="a whole number of seconds, 0 for none", types=(int,), minimum=0
    ),
    "stream_interval": _POSITIVE,
    # CORS, which the front answers.
    "allow_credentials": _FLAG,
    "allowed_headers": _TEXTS,
    "allowed_methods": _TEXTS,
    "allowed_origins": _TEXTS,
    # Layers and logs.
    "middleware": ArgumentType(
        expected="an import path or a list of them", types=(str, list, tuple), item_type=str
    ),
    "enable_log_deltas": _FLAG,
    "enable_log_outputs": _FLAG,
    "enable_log_requests": _FLAG,
    "log_error_stack": _FLAG,
    "max_log_len": _NON_NEGATIVE,
}
"""Arguments with the same effect as in vLLM alone."""

MIN_VLLM_VERSIONS: Mapping[str, tuple[int, int]] = {"reasoning_effort_map": (0, 33)}
"""The first vLLM with an argument, where an older supported version lacks it."""

CORS_ARGUMENTS = ("allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins")
"""For browsers of other origins; several models share one front for these."""

MODEL_KEYS: Mapping[str, str] = {
    "model": "source of the model",
    "served_model_name": "name of the model",
    "revision": "revision of the model",
    "max_model_len": "max_len of the model",
    "enable_lora": "adapters of the model",
    "lora_modules": "adapters of the model",
}
"""Arguments of API servers and engines that have their own key, by argument."""

CONFIG_KEYS: Mapping[str, str] = {
    **MODEL_KEYS,
    "model_tag": "source of the model",
    "allowed_media_domains": "server.allow.media_domains",
    "trust_request_chat_template": "server.allow.chat_templates",
    "enable_prompt_embeds": "server.allow.prompt_embeds",
    "api_key": "tenants.*.keys_file",
    "api_server_count": "server.replicas",
    "host": "server.host",
    "port": "server.port",
    "ssl_ca_certs": "security.tls.client_ca_file",
    "ssl_certfile": "security.tls.cert_file",
    "ssl_keyfile": "security.tls.key_file",
    "log_config_file": "observability.logs",
    "log_level": "observability.logs.level",
    "logging_config": "observability.logs",
    "max_num_queued_reqs": "admission.max_queued_requests",
    "otlp_traces_endpoint": "observability.tracing.otlp",
}
"""All arguments of API servers that have their own key."""

_NO_SERVER = "vLLM's HTTP server is not started, baton's front listens; remove it"
_NO_ROUTE = "its route is not opened by server.routes; remove it"
_NO_DOCS = "no pages of documentation are served; remove it"
_NO_LOCAL_FILES = (
    "clients could read files of the ingress' machine; have them send media in requests"
)

REJECTED_ARGUMENTS: Mapping[str, str] = {
    "allowed_local_media_path": _NO_LOCAL_FILES,
    "cohere_is_reasoning_model": _NO_ROUTE,
    "config": "everything is in one file, write its arguments here",
    "data_parallel_supervisor_port": "server.replicas says how many API servers there are",
    "disable_access_log_for_endpoints": _NO_SERVER,
    "disable_fastapi_docs": _NO_DOCS,
    "disable_log_stats": "baton counts itself (observability.metrics); remove it",
    "disable_uvicorn_access_log": _NO_SERVER,
    "dp_supervisor_probe_failure_threshold": "server.replicas says how many API servers there are",
    "dp_supervisor_probe_interval_s": "server.replicas says how many API servers there are",
    "dp_supervisor_probe_timeout_s": "server.replicas says how many API servers there are",
    "enable_flash_late_interaction": "models that score are not served; remove it",
    "enable_offline_docs": _NO_DOCS,
    "enable_per_request_metrics": "engines' times do not come to the API server, see"
    " 'baton explain route' and observability.tracing",
    "enable_scale_out": _NO_ROUTE,
    "enable_server_load_tracking": _NO_ROUTE,
    "enable_ssl_refresh": "certificates are read again when their files change; remove it",
    "enable_tokenizer_info_endpoint": _NO_ROUTE,
    "grpc": "only HTTP is served; remove it",
    "grpc_port": "only HTTP is served; remove it",
    "h11_max_header_count": _NO_SERVER,
    "h11_max_incomplete_event_size": _NO_SERVER,
    "headless": "an ingress is an API server; remove it",
    "hf_token": "a secret may not stand in a configuration; set HF_TOKEN where 'baton up' runs",
    "mm_processor_cache_gb": "baton keeps it at 0, for engines do not share what it leaves out",
    "root_path": "routes are served under their own paths; have the proxy take the prefix off",
    "skip_tokenizer_init": "prompts are tokenized by the API server; remove it",
    "ssl_cert_reqs": "clients need certificates where security.tls.client_ca_file is set",
    "ssl_ciphers": "HAProxy ends TLS 1.2 and 1.3 with its own list; remove it",
    "tokens_only": _NO_ROUTE,
    "uds": _NO_SERVER,
    "uvicorn_log_level": _NO_SERVER,
}
"""Arguments without effect in baton, each with the reason or remedy."""

_REQUIRED_WITH = (
    ("enable_auto_tool_choice", "tool_call_parser"),
    ("enable_log_outputs", "enable_log_requests"),
    ("allow_credentials", "allowed_origins"),
    ("fingerprint_value", "fingerprint_mode"),
)
"""Arguments that need another: without it they have no effect, or the API server fails to start."""


def problem_with(name: str, value: object) -> str | None:
    """The reason why an argument cannot be passed on, or None."""
    if name in CONFIG_KEYS:
        return f"cannot be passed on, use '{CONFIG_KEYS[name]}'"
    if name in REJECTED_ARGUMENTS:
        return f"cannot be had here: {REJECTED_ARGUMENTS[name]}"
    if name in ALLOWED_ARGUMENTS:
        # null is vLLM's default.
        return None if value is None else ALLOWED_ARGUMENTS[name].problem(value)
    matches = get_close_matches(name, ALLOWED_ARGUMENTS, n=1)
    suggestion = f"did you mean '{matches[0]}'? " if matches else ""
    return (
        f"is no argument that vLLM's API server heeds here; {suggestion}arguments of engines"
        " belong in"
        " engine.extra"
    )


def missing_companions(arguments: Mapping[str, object]) -> Mapping[str, str]:
    """Errors about arguments that need another, by argument."""
    return {
        name: f"does nothing without '{needed}', which is not given"
        for name, needed in _REQUIRED_WITH
        if arguments.get(name) and not arguments.get(needed)
    }
