"""vLLM's NIXL connector, which can also fetch the front of a prompt only and name its sources.

Theory of operation: vLLM loads this class in the scheduler's process and in each worker, by the
module path in `kv_transfer_config`; its name must stay vLLM's own, for vLLM asks for it by name.

Two things are added, the rest is vLLM's:

- A decode leg whose ticket covers fewer tokens than its prompt, or more: after a resume, what was
  generated before. vLLM takes for granted that the other engine holds just the prompt. Told
  `PREFIX_TOKENS_KEY`, this connector asks for that many tokens instead, and the scheduler computes
  the rest, as after a hit in its own cache. Blocks that the engine holds itself are not fetched,
  and the other engine's are freed, as in any pull.
- The source of each transfer. vLLM's statistics are lists with one entry for each transfer; beside
  them go the engine ids of the sources (`SOURCES_KEY`), and one id for each request whose pull
  failed (`FAILED_SOURCES_KEY`). These overrides hang on two private methods of the worker; where a
  new vLLM no longer calls them the lists stay empty, and a test with real engines says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from baton.engine.vllm.transfer_keys import (
    FAILED_SOURCES_KEY,
    PREFIX_TOKENS_KEY,
    SOURCES_KEY,
    TRANSFERS_KEY,
)


class NixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not followed
    """Both sides of the connector: which of them it is, its role says."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not `super()`: that makes vLLM's worker, and with it a NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        engine_id = self.engine_id
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPullConnectorScheduler(
                vllm_config, engine_id, kv_cache_config
            )
        else:
            self.connector_worker = SourcedWorker(vllm_config, engine_id, kv_cache_config)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens to fetch beyond those held here, and that this goes on beside steps."""
        # Not only its prompt: of a leg that was taken up, what was generated elsewhere comes too.
        wanted = prefix_to_fetch(request.kv_transfer_params, request.num_tokens)
        if wanted is None:
            found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return found
        missing = wanted - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> NixlKVConnectorStats:
        """Statistics out of what a worker sent, or empty ones."""
        return SourcedStats() if data is None else SourcedStats(data=data)


class SourcedStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM is not followed
    """vLLM's lists, and who each entry was from."""

    def reset(self) -> None:
        """Empty all lists."""
        super().reset()
        self.data[SOURCES_KEY] = []
        self.data[FAILED_SOURCES_KEY] = []

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return super().is_empty() and not self.data.get(FAILED_SOURCES_KEY)


class SourcedWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # vLLM is not followed
    """The worker's side, with a note of the source wherever vLLM counts a transfer."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = SourcedStats()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in tuple(transfers):
            source = self._source_of(request_id)
            one = {request_id: transfers.pop(request_id)}
            counted = len(self.xfer_stats.data[TRANSFERS_KEY])
            newly_done, newly_failed = super()._pop_done_transfers(one)
            transfers.update(one)
            more = len(self.xfer_stats.data[TRANSFERS_KEY]) - counted
            self.xfer_stats.data[SOURCES_KEY] += [source] * more
            done |= newly_done
            failed |= newly_failed
        return done, failed

    def _handle_failed_transfer(
        self,
        req_id: str,
        *args: Any,  # noqa: ANN401 - vLLM's own, passed on
        **kwargs: Any,  # noqa: ANN401
    ) -> bool:
        self.xfer_stats.data[FAILED_SOURCES_KEY].append(self._source_of(req_id))
        released: bool = super()._handle_failed_transfer(req_id, *args, **kwargs)
        return released

    def _source_of(self, request_id: str) -> str:
        """The engine that a request's blocks are fetched from; empty when it is not known."""
        meta = self._recving_metadata.get(request_id)
        return "" if meta is None or meta.remote is None else str(meta.remote.engine_id)


def prefix_to_fetch(params: Mapping[str, Any] | None, tokens: int) -> int | None:
    """Leading ones of a request's tokens to fetch or find here; None where a ticket says nothing.

    The other engine's own count wins: for some models it stops short of what it was asked for.
    """
    if not params or not params.get("do_remote_prefill") or PREFIX_TOKENS_KEY not in params:
        return None
    held = int(params.get("remote_num_tokens") or params[PREFIX_TOKENS_KEY])
    return min(held, tokens)
