"""vLLM's NIXL connector, with leases that hold, prefixes that are fetched, and sources named.

Theory of operation: vLLM loads this class in the scheduler's process and in each worker, by the
module path in `kv_transfer_config`; its name must stay vLLM's own, for vLLM asks for it by name.

Four things are added, the rest is vLLM's:

- No prompt goes on with blocks that were read after their lease had expired. vLLM's source serves
  such a read, and says so in its own log only. Here the source is asked after each read whether it
  still keeps the blocks (`lease_checks`), and is told to free them only after its answer; a read of
  blocks that were lost fails as a transfer does. vLLM's renewals come in fractions of a second, so
  that a short lease is renewed, too.
- A bound on the pulls under way. A leg beyond it waits in the scheduler, which renews its lease
  from the moment it has the request; legs without a pull pass it.
- A decode leg whose ticket covers fewer tokens than its prompt, or more: after a resume, what was
  generated before. vLLM takes for granted that the other engine holds just the prompt. Told
  `PREFIX_TOKENS_KEY`, this connector asks for that many tokens instead, and the scheduler computes
  the rest, as after a hit in its own cache. Blocks that the engine holds itself are not fetched,
  and the other engine's are freed, as in any pull.
- The source of each transfer. vLLM's statistics are lists with one entry for each transfer; beside
  them go the engine ids of the sources (`SOURCES_KEY`), and one id for each request whose pull
  failed (`FAILED_SOURCES_KEY`). These overrides hang on two private methods of the worker. Where a
  new vLLM has them in another form, the engine does not start (row `NIXL_CONNECTOR` of `table`).
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
from baton.engine.vllm.wire.transfer_keys import (
    FAILED_SOURCES_KEY,
    INVALIDATED_SOURCES_KEY,
    MAX_PULLS_KEY,
    PREFIX_TOKENS_KEY,
    PULL_DEADLINE_KEY,
    SOURCES_KEY,
    TRANSFERS_KEY,
)

# Where the settings say nothing; the lease is vLLM's own default.
_LEASE_S = 30
_PULL_DEADLINE_S = 2.0
_ANSWER_WAIT_S = 0.002
"""How long a worker waits for an answer: less than the next step, which would find it, takes."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not followed
    """Both sides of the connector: which of them it is, its role says."""

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
        """How many tokens to fetch beyond those held here, and that this goes on beside steps.

        None while the request has to wait for its turn to pull.
        """
        matched = self._tokens_to_fetch(request, num_computed_tokens)
        needs_pull = bool(matched[0]) and matched[1]
        return (None, False) if needs_pull and not self.connector_scheduler.can_pull() else matched

    def _tokens_to_fetch(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Not only its prompt: of a leg that was taken up, what was generated elsewhere comes too.
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
        """Statistics out of what a worker sent, or empty ones."""
        return SourceTrackingStats() if data is None else SourceTrackingStats(data=data)


class LeasingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM is not followed
    """The scheduler's side: which blocks are kept, and how many pulls are under way."""

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
        """A request has its blocks; it pulls when tokens are to come from elsewhere."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._reqs_need_recv and num_external_tokens:
            self._permits.begin(request.request_id, time.perf_counter())

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's blocks are kept for a puller, and what that one needs to know."""
        is_kept, params = super().request_finished(request, block_ids)
        if is_kept:
            self._kept_leases.add(request.request_id)
        return is_kept, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers have sent and received; the scheduler frees the former after this."""
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
    """vLLM's lists, and who each entry was from."""

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
    """A NIXL agent that reads without telling the source, which vLLM has it do with each read."""

    def __init__(self, agent: Any) -> None:  # noqa: ANN401 - NIXL's, which is not followed
        self._agent = agent
        self.deferred: list[bytes] = []
        """What would have been said to the sources of the reads since this was last emptied."""

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
    """The worker's side: asks sources after reads, and names them where vLLM counts transfers."""

    nixl_wrapper: Any
    """vLLM's name for its agent."""

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
        """Close what is open."""
        if hasattr(self, "_lease_queries"):  # not where vLLM's own part could not be made
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
            # vLLM sends these when it has found the request's reads to be done.
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
                transfers[request_id] = []  # vLLM is told when the source has answered
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
        """Ask whether a read's blocks are still kept; False where the read has failed anyway."""
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
        """The engine that a request's blocks are fetched from; empty when it is not known."""
        meta = self._recving_metadata.get(request_id)
        return "" if meta is None or meta.remote is None else str(meta.remote.engine_id)


def set_worker_nic(config: VllmConfig) -> None:
    """Have this worker's agent use the card that `VLLM_GPU_NIC_PCIE_MAPPING` has for its GPU.

    vLLM does that in workers that it starts as processes, and not in those that Ray starts, which
    the workers of an engine with several GPUs are. UCX reads the variable with the first agent.

    Raises:
        RuntimeError: the mapping does not have this GPU, or names a card that is not here.
        ValueError: it cannot be read.
    """
    if config.parallel_config.distributed_executor_backend == "ray":
        set_worker_net_device(get_world_group().local_rank, config)


def prefix_tokens_to_fetch(params: Mapping[str, Any] | None, tokens: int) -> int | None:
    """Leading ones of a request's tokens to fetch or find here; None where a ticket says nothing.

    The other engine's own count wins: for some models it stops short of what it was asked for.
    """
    if not params or not params.get("do_remote_prefill") or PREFIX_TOKENS_KEY not in params:
        return None
    source_tokens = int(params.get("remote_num_tokens") or params[PREFIX_TOKENS_KEY])
    return min(source_tokens, tokens)
