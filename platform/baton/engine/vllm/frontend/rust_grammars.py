"""What constrains answers, prepared as vLLM's Python frontend does it before an engine sees it.

vLLM's Rust frontend names a backend and leaves the rest as its client wrote it: engines then find a
list of choices, for which they have no grammar, and schemas that nobody has looked at. vLLM's own
check is made here instead: it turns choices into a grammar, chooses the backend, and raises for
what no engine could keep to.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.refusals import first_line
from baton.engine.vllm.wire.codec import UnsupportedRequest
from baton.runtime.patch import replace_attributes

_FIELD = "structured_outputs or response_format"
_TEXT_MODEL = SimpleNamespace(is_diffusion=False)
"""All that the check looks at of a model."""


class RustGrammars:
    """Prepares requests that came by the Rust frontend; from any thread."""

    def __init__(self, settings: FrontendSettings) -> None:
        """Read no tokenizer yet.

        Raises:
            EngineStartFailed: the installed vLLM checks in another way.
        """
        table.RUST_PARAMS.fits()
        arguments = {name.replace("-", "_"): value for name, value in settings.extra.items()}
        config = arguments.get("structured_outputs_config")
        self._config = StructuredOutputsConfig(**config if isinstance(config, Mapping) else {})
        self._tokenizer_arguments = {
            "tokenizer_name": arguments.get("tokenizer") or settings.model,
            "tokenizer_mode": arguments.get("tokenizer_mode") or "auto",
            "revision": arguments.get("tokenizer_revision") or arguments.get("revision"),
        }
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: Any = None

    def prepare(self, request: EngineCoreRequest) -> None:
        """Put into the request what engines go by. Blocks: a grammar may be long.

        Raises:
            UnsupportedRequest: no engine could keep to it; the text names the field.
        """
        params = request.sampling_params
        assert params is not None, "only requests with constraints are prepared"
        # The frontend's choice, without a look at what is to be chosen for.
        replace_attributes(params.structured_outputs, _backend=None)
        try:
            params._validate_structured_outputs(  # noqa: SLF001 - row RUST_PARAMS
                _TEXT_MODEL, self._config, self._load_tokenizer()
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            why = f"{_FIELD}: {first_line(error)}"
            raise UnsupportedRequest(request.request_id, why) from error

    def _load_tokenizer(self) -> Any:  # noqa: ANN401 - vllm is not followed
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = get_tokenizer(**self._tokenizer_arguments)
            return self._tokenizer
