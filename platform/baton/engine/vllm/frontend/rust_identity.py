"""Who asks, on the way from the gate before vLLM's Rust frontend to the seam.

Nothing of a request's headers reaches an engine but its id. So the gate names every request
`<name>~<handle>~<class>`: the name is the client's or the gate's own, the handle stands for a
tenant, the class is the one that was asked for, or nothing. After the class comes `+<session>`
where a client named its session; the word is a digest of that name. The frontend repeats the id to
the client, so that a handle is a random word of this process that says nothing of the tenant, and
only whoever asks as that tenant has seen it. The gate replaces whatever id a client sends, and the
frontend lets the header go before the body.

A request without a handle that is known here did not come through the gate: it is not run. What a
client may not say itself is taken off here, because no Python sees the request before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection

from vllm.v1.engine import EngineCoreRequest

from baton.domain.names.trace_context import TraceContext
from baton.engine.vllm.gate.limits import FrontendLimits, too_many_bad_words
from baton.engine.vllm.wire.codec import UnsupportedRequest
from baton.engine.vllm.wire.identity import Caller, tenant_session_id

SEPARATOR = "~"
"""In no name that a client may give, and in no tenant's or class' name."""
SESSION_MARK = "+"
"""Between a class and a session; in no class' name."""
_HANDLE_BYTES = 9


class RustCallers:
    """Handles of tenants, and the requests that came under them."""

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
        """Tenants whose cached prefixes are their own; likewise."""
        self._max_len_tokens = max_len_tokens
        self._new_handle = new_handle
        self._handles: dict[str, str] = {}
        self._tenants: dict[str, str] = {}

    def tenant_handle(self, tenant: str) -> str:
        """The word for a tenant, for as long as this process runs."""
        if tenant not in self._handles:
            handle = self._handles[tenant] = self._new_handle()
            self._tenants[handle] = tenant
        return self._handles[tenant]

    def identify(self, request: EngineCoreRequest) -> tuple[Caller, TraceContext | None]:
        """Who asks. Whatever the request says of that, or of its place in a queue, is taken off.

        Raises:
            UnsupportedRequest: it did not come through the gate, or asks for more than it may.
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
        """Hold a request to the limits that can only be seen here.

        Too many tokens are cut to what is allowed rather than refused: the frontend has cut them
        already to what the context holds, and gives as many to a client that did not say. So a
        request for all that is left is taken for one that did not say.
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
