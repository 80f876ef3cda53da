"""The LoRA adapters of a vLLM engine, loaded when a leg first needs one.

Theory of operation: vLLM loads an adapter in the step that first needs it, and a failure ends the
engine with all its legs. So this module loads it by a call before the leg, and a wrong path or rank
fails only that leg. Either way the engine computes nothing meanwhile. vLLM keeps the
`max_cpu_loras` most recently used and does not report them, so this module tracks them. After an
error in that record, vLLM loads an adapter again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.domain.errors import AdapterFailed
from baton.domain.fleet import AdapterStatus
from baton.runtime.known_adapters import KnownAdapters

_MAX_REASON_CHARS = 300


def resolve_local_path(source: str) -> str:
    """The adapter's path on this machine, downloaded if necessary; blocks.

    The source itself after a failure: the engine reports the error when a leg needs it.
    """
    with suppress(OSError, ValueError):
        return str(get_adapter_absolute_path(source))
    return source


class EngineAdapters:
    """The adapters that an engine serves."""

    def __init__(self, known_adapters: KnownAdapters, *, slots: int) -> None:
        self._known_adapters = known_adapters
        self._requests: dict[str, LoRARequest] = {}
        """By adapter; vLLM knows adapters by the ids of these."""
        for name, source in known_adapters.fixed.items():
            self._add(name, source)
        self._loaded_adapters = LoadedAdapters(slots)
        self._by_leg: dict[str, str] = {}
        self._load_lock = asyncio.Lock()

    def download_all(self) -> None:
        """Download the adapters; blocks.

        Otherwise the first request for an adapter would stall all legs. A failure shows when a leg
        needs the adapter.
        """
        for request in self._requests.values():
            request.lora_path = resolve_local_path(request.lora_path)

    async def ensure_loaded(
        self,
        leg_id: str,
        name: str | None,
        load_adapter: Callable[[LoRARequest], Awaitable[object]],
    ) -> LoRARequest | None:
        """Load a leg's adapter if necessary; None for a leg without one.

        `load_adapter` has the engine load an adapter, and may raise.

        Raises:
            AdapterFailed: there is no such adapter, or it cannot be loaded.
        """
        if name is None:
            return None
        source = await self._known_adapters.source(name)
        request = self._requests.get(name)
        is_new = request is None
        if request is None:
            request = self._add(name, source)
        self._loaded_adapters.on_leg_started(name)
        self._by_leg[leg_id] = name
        try:
            async with self._load_lock:
                if not self._loaded_adapters.touch(name):
                    if is_new:
                        request.lora_path = await asyncio.to_thread(resolve_local_path, source)
                    await self._load(request, load_adapter)
        except BaseException:
            self.on_leg_ended(leg_id)
            raise
        return request

    def _add(self, name: str, source: str) -> LoRARequest:
        number = len(self._requests) + 1
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=source)
        self._requests[name] = request
        return request

    async def _load(
        self, request: LoRARequest, load_adapter: Callable[[LoRARequest], Awaitable[object]]
    ) -> None:
        started_s = asyncio.get_running_loop().time()
        try:
            await load_adapter(request)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = (lines[-1] if lines else type(error).__name__)[-_MAX_REASON_CHARS:]
            raise AdapterFailed(request.lora_name, f"{request.lora_path}: {reason}") from error
        elapsed_s = asyncio.get_running_loop().time() - started_s
        self._loaded_adapters.on_loaded(request.lora_name, elapsed_s)

    def on_leg_ended(self, leg_id: str) -> None:
        """Record the end of a leg, with or without an adapter."""
        self._loaded_adapters.on_leg_ended(self._by_leg.pop(leg_id, None))

    def adapter_load(self) -> AdapterStatus:
        """The loaded adapters, for the replica's load."""
        return self._loaded_adapters.report()
