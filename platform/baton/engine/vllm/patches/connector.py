"""vLLM's NIXL connector with lease checks, bounded pulls, prefix fetches and named sources.

Theory of operation: vLLM loads this class in the scheduler's process and in each worker, by the
module path in `kv_transfer_config`. It also looks the class up by its name, which must stay. Four
things are added to vLLM's connector:

- Lease checks. vLLM's source serves a read after its lease has expired, and only logs that. Here
  the worker asks after each read whether the source still keeps the blocks (`lease_checks`). It
  tells the source to free them only after the answer, and a read of lost blocks fails like a
  transfer. vLLM's interval of renewals is fixed; here it is a fraction of the lease.
- A limit of concurrent pulls. A leg beyond it waits in the scheduler, which renews its lease
  from its arrival; legs without a pull pass it.
- Prefix fetches. vLLM assumes that the other engine holds exactly the prompt. With
  `PREFIX_TOKENS_KEY` this connector fetches that many tokens: fewer than the prompt, or, after a
  resume, more. The scheduler computes the rest, as after a hit in its own cache. Blocks that the
  engine holds are not fetched; the other engine frees its blocks as in any pull.
- Sources of transfers. vLLM's statistics are lists with one entry per transfer. This adds the
  engine ids of the sources (`SOURCES_KEY`), and an id for each request whose pull failed
  (`FAILED_SOURCES_KEY`). These overrides need two private methods of the worker. If a new vLLM
  changes them, the engine does not start (row `NIXL_CONNECTOR` of `table`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
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
from vllm.distributed.parallel_state import get_world_group
from vllm.utils.network_utils import make_zmq_path
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.executor.vllm_net_devices import set_worker_net_device
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from baton.control.request.pull_permits import PullPermits
from baton.domain.handoff import RENEWALS_PER_LEASE, renewed_expiry_s
from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.lease_checks import CompletedRead, KeptLeases, LeaseQueries, listen
from baton.engine.vllm.wire.keys import (
    FAILED_SOURCES_KEY,
    INVALIDATED_SOURCES_KEY,
    MAX_PULLS_KEY,
    PREFIX_TOKENS_KEY,
    PULL_DEADLINE_KEY,
    SOURCES_KEY,
    TRANSFERS_KEY,
)

# Defaults without a setting; the lease is vLLM's own default.
_LEASE_S = 30
_PULL_DEADLINE_S = 2.0
_ANSWER_WAIT_S = 0.002
"""A worker's wait for an answer: shorter than the next step, which would find it."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not followed
    """Both sides of the connector; its role tells which."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        table.NIXL_CONNECTOR.fits()
        # Not `super()`: that makes vLLM's worker, and with it a NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        engine_id = self.engine_id
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = LeasingScheduler(vllm_config, engine_id, kv_cache_config)
        else:
            self.connector_worker = SourceTrackingWorker(vllm_config, engine_id, kv_cache_config)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens to fetch beyond local hits, and whether that happens asynchronously.

        None while the request waits for its turn to pull.
        """
        matched = self._tokens_to_fetch(request, num_computed_tokens)
        needs_pull = bool(matched[0]) and matched[1]
        return (None, False) if needs_pull and not self.connector_scheduler.can_pull() else matched

    def _tokens_to_fetch(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # All tokens, not only the prompt's: a resumed leg also fetches generated tokens.
        prefix_tokens = prefix_tokens_to_fetch(request.kv_transfer_params, request.num_tokens)
        if prefix_tokens is None:
            matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            return matched
        missing_tokens = prefix_tokens - num_computed_tokens
        return (missing_tokens, True) if missing_tokens > 0 else (0, False)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> NixlKVConnectorStats:
        """Statistics from a worker's data, or empty."""
        return SourceTrackingStats() if data is None else SourceTrackingStats(data=data)


class LeasingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM is not followed
    """The scheduler's side: leases that it keeps, and pulls in flight."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        settings = vllm_config.kv_transfer_config
        self._heartbeat_interval = self._kv_lease_duration / RENEWALS_PER_LEASE
        self._kept_leases = KeptLeases()
        self._permits = PullPermits(
            limit=settings.get_from_extra_config(MAX_PULLS_KEY, None),
            max_pull_s=settings.get_from_extra_config(PULL_DEADLINE_KEY, _PULL_DEADLINE_S),
        )

    def can_pull(self) -> bool:
        """Whether one more request may begin to pull."""
        return self._permits.can_begin(time.perf_counter())

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record that a request has its blocks, and pulls if it needs external tokens."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._reqs_need_recv and num_external_tokens:
            self._permits.begin(request.request_id, time.perf_counter())

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's blocks are kept for a pull, and the parameters of that pull."""
        is_kept, params = super().request_finished(request, block_ids)
        if is_kept:
            self._kept_leases.add(request.request_id)
        return is_kept, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record finished sends and receives; the scheduler then frees the blocks sent."""
        super().update_connector_output(connector_output)
        self._kept_leases.remove(connector_output.finished_sending or ())
        for request_id in connector_output.finished_recving or ():
            self._permits.end(request_id)

    def _nixl_handshake_listener(
        self,
        encoded_data: Mapping[tuple[int, int], bytes],
        ready_event: threading.Event,
        stop_event: threading.Event,
        host: str,
        port: int,
    ) -> None:
        """The side channel: vLLM runs this in a thread of its own."""
        listen(
            make_zmq_path("tcp", host, port),
            metadata=encoded_data,
            leases=self._kept_leases,
            ready=ready_event,
            stop=stop_event,
        )


class SourceTrackingStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM is not followed
    """VLLM's lists, with the source of each entry."""

    def reset(self) -> None:
        """Empty all lists."""
        super().reset()
        self.data[SOURCES_KEY] = []
        self.data[FAILED_SOURCES_KEY] = []
        self.data[INVALIDATED_SOURCES_KEY] = []

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        more = (FAILED_SOURCES_KEY, INVALIDATED_SOURCES_KEY)
        return super().is_empty() and not any(self.data.get(key) for key in more)


class DeferredNotifyAgent:
    """A NIXL agent that reads without notifying the source, as vLLM has it do with each read."""

    def __init__(self, agent: Any) -> None:  # noqa: ANN401 - NIXL's, which is not followed
        self._agent = agent
        self.deferred: list[bytes] = []
        """Notifications of the reads since this was last emptied."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._agent, name)

    def make_prepped_xfer(
        self,
        operation: str,
        *args: Any,  # noqa: ANN401
        notif_msg: bytes = b"",
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Prepare a transfer."""
        if operation == "READ" and notif_msg:
            self.deferred.append(notif_msg)
            notif_msg = b""
        return self._agent.make_prepped_xfer(operation, *args, notif_msg=notif_msg, **kwargs)


class SourceTrackingWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # vLLM is not followed
    """The worker's side: queries sources after reads, and names them for each transfer."""

    nixl_wrapper: Any
    """VLLM's name for its agent."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        set_worker_nic(vllm_config)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        settings = vllm_config.kv_transfer_config
        self.xfer_stats = SourceTrackingStats()
        self._agent = DeferredNotifyAgent(self.nixl_wrapper)
        self.nixl_wrapper = self._agent
        lease_s = settings.get_from_extra_config("kv_lease_duration", _LEASE_S)
        self._lease_extension = renewed_expiry_s(0.0, lease_s)
        self._lease_queries = LeaseQueries(
            deadline_s=settings.get_from_extra_config(PULL_DEADLINE_KEY, _PULL_DEADLINE_S)
        )

    def shutdown(self) -> None:
        """Close the connections, too."""
        if hasattr(self, "_lease_queries"):  # absent if vLLM's constructor raised
            self._lease_queries.close()
        super().shutdown()

    def _read_blocks(
        self,
        *,
        request_id: str,
        dst_engine_id: str,
        read_spec: Any,  # noqa: ANN401 - vLLM's own, passed on
        **kwargs: Any,  # noqa: ANN401
    ) -> bool:
        self._agent.deferred.clear()
        posted: bool = super()._read_blocks(
            request_id=request_id, dst_engine_id=dst_engine_id, read_spec=read_spec, **kwargs
        )
        agent_name = self._remote_agents[dst_engine_id][(0, read_spec.remote_rank)]
        for notification in self._agent.deferred:
            # vLLM sends these after the request's reads.
            self._pending_recv_notifs.setdefault(request_id, []).append((agent_name, notification))
        return posted

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        has_queries = False
        for request_id in tuple(transfers):
            if request_id in self._lease_queries:
                continue
            source = self._source_of(request_id)
            handles = transfers.pop(request_id)
            single = {request_id: handles}
            count_before = len(self.xfer_stats.data[TRANSFERS_KEY])
            newly_done, newly_failed = super()._pop_done_transfers(single)
            transfers.update(single)
            new_transfers = len(self.xfer_stats.data[TRANSFERS_KEY]) - count_before
            self.xfer_stats.data[SOURCES_KEY] += [source] * new_transfers
            failed |= newly_failed
            if newly_done and handles and not newly_failed and self._query_source(request_id):
                transfers[request_id] = []  # vLLM learns of it after the source's answer
                has_queries = True
            else:
                done |= newly_done
        for request_id, was_kept in self._lease_queries.poll_replies(
            wait_s=_ANSWER_WAIT_S if has_queries else 0.0
        ).items():
            transfers.pop(request_id, None)
            done.add(request_id)
            if not was_kept:
                self.xfer_stats.data[INVALIDATED_SOURCES_KEY].append(self._source_of(request_id))
                failed.add(request_id)
        return done, failed

    def _query_source(self, request_id: str) -> bool:
        """Ask whether a read's blocks are still kept; False if the read has failed anyway."""
        meta = self._recving_metadata.get(request_id)
        if request_id in self._recv_failures or meta is None or meta.remote is None:
            return False
        remote = meta.remote
        address = make_zmq_path("tcp", remote.host, remote.port)
        self._lease_queries.query(address, CompletedRead(request_id, remote.request_id))
        return True

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
        """The engine that a request's blocks come from; empty if unknown."""
        meta = self._recving_metadata.get(request_id)
        return "" if meta is None or meta.remote is None else str(meta.remote.engine_id)


def set_worker_nic(config: VllmConfig) -> None:
    """Have this worker's agent use its GPU's card in `VLLM_GPU_NIC_PCIE_MAPPING`.

    vLLM does that in workers that it starts as processes, but not in Ray's workers, which engines
    with several GPUs use. UCX reads the variable with the first agent.

    Raises:
        RuntimeError: the mapping lacks this GPU, or names a card that is not here.
        ValueError: it cannot be parsed.
    """
    if config.parallel_config.distributed_executor_backend == "ray":
        set_worker_net_device(get_world_group().local_rank, config)


def prefix_tokens_to_fetch(params: Mapping[str, Any] | None, tokens: int) -> int | None:
    """How many leading tokens to fetch or find here; None where the KV handle does not say.

    The other engine's count wins: for some models it stops short of the request.
    """
    if not params or not params.get("do_remote_prefill") or PREFIX_TOKENS_KEY not in params:
        return None
    source_tokens = int(params.get("remote_num_tokens") or params[PREFIX_TOKENS_KEY])
    return min(source_tokens, tokens)
