"""What no single key shows of the arguments that are passed on to vLLM's API servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.config.seen import Seen
from baton.config.tree import Finding

_OWN_KEYS: Mapping[str, str] = {
    "model": "source of the model",
    "served_model_name": "name of the model",
    "revision": "revision of the model",
    "max_model_len": "max_len of the model",
    "enable_lora": "adapters of the model",
    "lora_modules": "adapters of the model",
    "allowed_media_domains": "server.allow.media_domains",
    "trust_request_chat_template": "server.allow.chat_templates",
    "enable_prompt_embeds": "server.allow.prompt_embeds",
    "api_key": "tenants.*.keys_file",
    "host": "server.host",
    "port": "server.port",
    "ssl_certfile": "security.tls",
    "ssl_keyfile": "security.tls",
}
"""Arguments of vLLM's API server that have a key of their own, and which."""


def check_api(seen: Seen) -> Iterator[Finding]:
    """Everything that is wrong with them."""
    for name, model in seen.models().items():
        for argument in model.api:
            if argument in _OWN_KEYS:
                what = f"cannot be passed on, use '{_OWN_KEYS[argument]}'"
                yield seen.wrong(("models", name, "api", argument), what)
