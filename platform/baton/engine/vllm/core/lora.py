"""The LoRA adapters of one vLLM engine: loaded when a leg first needs one.

Theory of operation: vLLM loads an adapter in the step that first needs it, and one that cannot be
loaded ends the engine with all that runs on it. Here it is loaded by a call of its own before the
leg is handed over, so that a wrong path or rank costs that leg alone. Either way the engine
computes nothing meanwhile. vLLM keeps `max_cpu_loras` of them and forgets the longest unused; which
they are is kept book of here, for it does not say. Where the book errs, vLLM loads again what it
has loaded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.domain.errors import AdapterFailed
from baton.domain.fleet import AdapterLoad
from baton.runtime.known_adapters import KnownAdapters

_MAX_WHY_CHARS = 300


def local_path(source: str) -> str:
    """Where an adapter is on this machine, brought from the hub if need be; blocks.

    The source itself where it cannot be had: an engine says so when it is asked for.
    """
    with suppress(OSError, ValueError):
        return str(get_adapter_absolute_path(source))
    return source


class EngineAdapters:
    """What an engine serves besides its model."""

    def __init__(self, known: KnownAdapters, *, slots: int) -> None:
        self._known = known
        self._requests: dict[str, LoRARequest] = {}
        """Of every adapter that was ever asked for: vLLM knows them by their ids."""
        for name, source in known.fixed.items():
            self._add(name, source)
        self._book = LoadedAdapters(slots)
        self._by_leg: dict[str, str] = {}
        self._loading = asyncio.Lock()

    def fetch(self) -> None:
        """Bring adapters from a hub to this machine; blocks.

        Left to the engine, the first request for one would hold up all that runs there. One that
        cannot be had is told of when it is asked for.
        """
        for request in self._requests.values():
            request.lora_path = local_path(request.lora_path)

    async def ready(
        self, leg_id: str, name: str | None, load: Callable[[LoRARequest], Awaitable[object]]
    ) -> LoRARequest | None:
        """See to it that a leg's adapter is there; None for a leg without one.

        `load` has the engine load an adapter, and raises what it raises.

        Raises:
            AdapterFailed: there is no such adapter, or it cannot be loaded.
        """
        if name is None:
            return None
        source = await self._known.source(name)
        request = self._requests.get(name)
        is_new = request is None
        if request is None:
            request = self._add(name, source)
        self._book.leg_came(name)
        self._by_leg[leg_id] = name
        try:
            async with self._loading:
                if not self._book.use(name):
                    if is_new:
                        request.lora_path = await asyncio.to_thread(local_path, source)
                    await self._load(request, load)
        except BaseException:
            self.leg_over(leg_id)
            raise
        return request

    def _add(self, name: str, source: str) -> LoRARequest:
        number = len(self._requests) + 1
        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=source)
        self._requests[name] = request
        return request

    async def _load(
        self, request: LoRARequest, load: Callable[[LoRARequest], Awaitable[object]]
    ) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            await load(request)
        except Exception as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = (said[-1] if said else type(error).__name__)[-_MAX_WHY_CHARS:]
            raise AdapterFailed(request.lora_name, f"{request.lora_path}: {why}") from error
        took_s = asyncio.get_running_loop().time() - began_s
        self._book.loaded(request.lora_name, took_s)

    def leg_over(self, leg_id: str) -> None:
        """A leg is over; one without an adapter is ignored."""
        self._book.leg_over(self._by_leg.pop(leg_id, None))

    def told(self) -> AdapterLoad:
        """What others are told of them."""
        return self._book.told()
