"""Real vLLM engines on the tiny model, small enough for several on a laptop."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from baton.domain.fleet import Role
from baton.domain.handoff import Leg
from baton.domain.value import evolve
from baton.engine.vllm.settings import Nixl, OnLoadFailure, VllmEngineSettings
from baton.transfer.peers import Peers
from baton.transfer.side_channel import SideChannelChecks

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    from baton.engine.tiny_model import write_tiny_model
    from baton.engine.vllm.adapter import VllmEngine
    from baton.engine.vllm.facts import side_channel
    from baton.engine.vllm.series import VllmSeries
    from baton.engine.vllm.wire import pack_frames

__all__ = [
    "VllmEngine",
    "VllmSeries",
    "checking_engine",
    "engine_settings",
    "free_port",
    "payload",
    "peering_engine",
    "tiny_model",
    "with_payload",
]

MAX_LEN_TOKENS = 2048
HOST = "127.0.0.1"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_PORTS = iter(range(15_000 + os.getpid() % 500 * 32, 32_000))
"""Below those that Linux gives to outgoing connections; each is given out once."""


def free_port() -> int:
    """A port that nobody has, and that no outgoing connection will have before an engine binds it.

    A vLLM engine whose side channel finds its port taken waits for it for ever.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError("no port below the ephemeral ones is free")


def tiny_model(folder: Path) -> Path:
    """The tiny model, written into `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return write_tiny_model(folder / "tiny")


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
        nixl=Nixl(host=HOST, port=port or free_port(), on_load_failure=on_load_failure),
        start_deadline_s=240.0,
        env=ENVIRONMENT,
    )


def checking_engine(
    settings: VllmEngineSettings, *, series: VllmSeries | None = None
) -> VllmEngine:
    """An engine that checks side channels, as replicas do."""
    checks = SideChannelChecks(settings.replica_id, side_channel(settings))
    return VllmEngine(settings, check=checks.check, series=series)


def peering_engine(settings: VllmEngineSettings) -> VllmEngine:
    """An engine that checks side channels and reads its transports, wired as a replica's is."""
    peers = Peers(settings.replica_id, side_channel(settings))
    settings = replace(settings, env={**peers.environment(), **settings.env})
    return VllmEngine(settings, check=peers.check, transport=peers.transport)


@cache
def payload(*, cache_salt: str | None = None, **sampling: object) -> bytes:
    """What the frontend would have sealed: greedy, ends by length only."""
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True, **sampling),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )
    return pack_frames(MsgpackEncoder().encode(request))


def with_payload(leg: Leg, **sampling: object) -> Leg:
    """The leg with sampling parameters that a vLLM engine understands."""
    return evolve(leg, payload=payload(cache_salt=leg.cache_salt, **sampling))
