"""Real vLLM engines on the tiny model, small enough for several on a laptop."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from baton.domain.fleet import Role
from baton.domain.handoff import KvHandle, Leg, LegKind
from baton.domain.value import evolve
from baton.engine.vllm.core.settings import NixlSettings, OnLoadFailure, VllmEngineSettings
from baton.transfer.peers import Peers
from baton.transfer.side_channel import SideChannelChecker
from tests.contracts.engine_contract import EngineTests
from tests.fakes.free_ports import HOST, free_port
from tests.fakes.frontends import engine_request
from tests.fakes.scaled_deadline import slowdown

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.serial_utils import MsgpackEncoder

    from baton.engine.vllm.core.engine import VllmEngine
    from baton.engine.vllm.core.facts import side_channel_address
    from baton.engine.vllm.core.series import VllmSeries
    from baton.engine.vllm.wire.codec import pack_frames

__all__ = [
    "VllmEngine",
    "VllmSeries",
    "engine_settings",
    "engine_with_checks",
    "engine_with_peers",
    "payload",
    "with_payload",
]

MAX_LEN_TOKENS = 2048
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def engine_settings(
    model: Path,
    role: Role,
    *,
    port: int | None = None,
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
) -> VllmEngineSettings:
    """Settings of an engine with a side channel on a free port."""
    return VllmEngineSettings(
        replica_id=f"{role}-0",
        pool=role.value,
        model_source=str(model),
        model_name="tiny",
        role=role,
        max_len_tokens=MAX_LEN_TOKENS,
        block_size_tokens=32,
        kv_cache_bytes=64 << 20,
        enforce_eager=True,
        nixl=NixlSettings(host=HOST, port=port or free_port(), on_load_failure=on_load_failure),
        start_deadline_s=240.0 * slowdown(),
        env=ENVIRONMENT,
    )


def engine_with_checks(
    settings: VllmEngineSettings, *, series: VllmSeries | None = None
) -> VllmEngine:
    """An engine that checks side channels, as replicas do."""
    checks = SideChannelChecker(settings.replica_id, side_channel_address(settings))
    return VllmEngine(settings, side_channel_check=checks.check, series=series)


def engine_with_peers(settings: VllmEngineSettings) -> VllmEngine:
    """An engine that checks side channels and reads its transports, wired as a replica's is."""
    return make_engine_and_peers(settings)[0]


def make_engine_and_peers(settings: VllmEngineSettings) -> tuple[VllmEngine, Peers]:
    """Such an engine, and what it knows of others."""
    workers = settings.tensor_parallel * settings.pipeline_parallel
    peers = Peers(settings.replica_id, side_channel_address(settings), workers=workers)
    settings = replace(settings, env={**peers.environment(), **settings.env})
    engine = VllmEngine(settings, side_channel_check=peers.check, transport=peers.transport)
    peers.query_ranks = engine.rank_transports
    return engine, peers


@cache
def payload(*, cache_salt: str | None = None, **sampling: object) -> bytes:
    """What the frontend would have sealed: greedy, ends by length only."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    request = engine_request(
        "", prompt_token_ids=None, sampling_params=params, cache_salt=cache_salt
    )
    return pack_frames(MsgpackEncoder().encode(request))


def uncompilable_outputs(backend: str | None = "xgrammar") -> StructuredOutputsParams:
    """What xgrammar has no grammar for, as a frontend would send it that prepares nothing."""
    params = StructuredOutputsParams(choice=["yes", "no"])
    params._backend = backend
    return params


def with_payload(leg: Leg, **sampling: object) -> Leg:
    """The leg with sampling parameters that a vLLM engine understands."""
    # What is asked for in a dictionary or a dataclass has no hash to be remembered by.
    write = payload.__wrapped__ if "structured_outputs" in sampling else payload
    return evolve(leg, payload=write(cache_salt=leg.cache_salt, **sampling))


class VllmLegs(EngineTests):
    """Legs of these tests with sampling parameters."""

    def make_leg(
        self,
        kind: LegKind,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        ticket: KvHandle | None = None,
        resumed_tokens: int = 0,
    ) -> Leg:
        leg = super().make_leg(
            kind, prompt, max_tokens=max_tokens, ticket=ticket, resumed_tokens=resumed_tokens
        )
        return with_payload(leg)
