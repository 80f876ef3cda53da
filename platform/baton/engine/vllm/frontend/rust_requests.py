"""Callers and grammars of requests that come through vLLM's Rust frontend to the engine server.

Only the id of a request reaches an engine, no other header. So the gate names every request
`<name>~<handle>~<class>`: the name is the client's or the gate's, the handle stands for a tenant,
and the class may be empty. `+<session>` follows where a client named its session, as a digest. The
frontend repeats the id to the client. So a handle is a random word of this process, which reveals
no tenant, and which only callers of that tenant see. The gate replaces any id that a client sends;
the frontend prefers the header to the body.

A request without a known handle did not come through the gate and fails. Fields that a client must
not set are reset here, because no other Python code sees the request before.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest

from baton.domain.names.trace_context import TraceContext
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.engine.vllm.gate.limits import FrontendLimits, too_many_bad_words
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.refusals import first_line
from baton.engine.vllm.wire.codec import UnsupportedRequest
from baton.engine.vllm.wire.identity import Caller, tenant_session_id
from baton.runtime.patch import replace_attributes

SEPARATOR = "~"
"""In no name that a client may give, and in no tenant's or class' name."""
SESSION_MARK = "+"
"""Between a class and a session; in no class' name."""
_HANDLE_BYTES = 9
_FIELD = "structured_outputs or response_format"
_TEXT_MODEL = SimpleNamespace(is_diffusion=False)
"""The only attribute of a model that the check reads."""


class RustCallers:
    """Handles of tenants, and the callers of requests."""

    def __init__(
        self,
        *,
        limits: FrontendLimits,
        max_len_tokens: int,
        isolated: Collection[str] = (),
        new_handle: Callable[[], str] = lambda: secrets.token_hex(_HANDLE_BYTES),
    ) -> None:
        self.limits = limits
        """May be replaced at any time."""
        self.isolated = isolated
        """Tenants with a prefix cache of their own; may be replaced likewise."""
        self._max_len_tokens = max_len_tokens
        self._new_handle = new_handle
        self._handles: dict[str, str] = {}
        self._tenants: dict[str, str] = {}

    def tenant_handle(self, tenant: str) -> str:
        """The handle of a tenant, for the life of this process."""
        if tenant not in self._handles:
            handle = self._handles[tenant] = self._new_handle()
            self._tenants[handle] = tenant
        return self._handles[tenant]

    def identify(self, request: EngineCoreRequest) -> tuple[Caller, TraceContext | None]:
        """The caller. Resets the request's priority and session.

        Raises:
            UnsupportedRequest: it did not come through the gate, or exceeds a limit.
        """
        _, *parts = (request.external_req_id or "").rsplit(SEPARATOR, 2)
        if len(parts) != 2 or (tenant := self._tenants.get(parts[0])) is None:  # noqa: PLR2004
            raise UnsupportedRequest(request.request_id, "it did not come through the gate")
        slo_class, _, session = parts[1].partition(SESSION_MARK)
        caller = Caller(tenant, slo_class or None, tenant if tenant in self.isolated else None)
        request.priority = 0
        request.session_id = tenant_session_id(caller, request.session_id, session)
        self._apply_limits(request)
        return caller, None

    def _apply_limits(self, request: EngineCoreRequest) -> None:
        """Apply limits that need the frontend's result.

        Too many tokens are cut, not refused: the frontend has cut them to the context already, and
        gives as many to a request without a limit. So a request for all that is left counts as one
        without a limit.
        """
        params = request.sampling_params
        remaining_tokens = self._max_len_tokens - len(request.prompt_token_ids or ())
        requested_tokens = remaining_tokens if params.max_tokens is None else params.max_tokens
        max_tokens = (
            self.limits.default_output_tokens
            if requested_tokens >= remaining_tokens
            else self.limits.max_tokens
        )
        if max_tokens is not None:
            params.max_tokens = min(requested_tokens, max_tokens)
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        bad_words = params._bad_words_token_ids  # noqa: SLF001 - where the frontend puts them
        if (problem := too_many_bad_words(bad_words)) is not None:
            raise UnsupportedRequest(request.request_id, problem.message)


class RustGrammars:
    """Prepares requests of the Rust frontend; from any thread.

    vLLM's Rust frontend names a backend and passes the rest as its client wrote it. Engines would
    get a list of choices without a grammar, and unchecked schemas. So vLLM's own check runs here:
    it turns choices into a grammar, chooses the backend, and raises if no engine could comply.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        """Read no tokenizer yet.

        Raises:
            EngineStartFailed: the installed vLLM has another check.
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
        """Complete the request's constraints. Blocks: a grammar may be long.

        Raises:
            UnsupportedRequest: no engine could comply; the text names the field.
        """
        params = request.sampling_params
        assert params is not None, "only requests with constraints are prepared"
        # The frontend chose it without a look at the grammar.
        replace_attributes(params.structured_outputs, _backend=None)
        try:
            params._validate_structured_outputs(  # noqa: SLF001 - row RUST_PARAMS
                _TEXT_MODEL, self._config, self._load_tokenizer()
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            reason = f"{_FIELD}: {first_line(error)}"
            raise UnsupportedRequest(request.request_id, reason) from error

    def _load_tokenizer(self) -> Any:  # noqa: ANN401 - vllm is not followed
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = get_tokenizer(**self._tokenizer_arguments)
            return self._tokenizer
