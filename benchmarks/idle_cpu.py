"""What two idle engines cost after a transfer, with NIXL as it comes and slowed down.

Prints one JSON object: cores used by each engine process, prefill and decode, for each delay of
NIXL's progress thread (`none` is NIXL's own busy polling), and how long the transfers took.

    python benchmarks/idle_cpu.py [--delays-us none,1000,10000] [--window-s 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import psutil
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegKind, LegOutput
from baton.domain.value import evolve
from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.adapter import VllmEngine
from baton.engine.vllm.settings import Nixl, VllmEngineSettings
from baton.engine.vllm.wire import pack_frames

SETTLE_S = 5.0
TRANSFERS = 10
PROMPT_TOKENS = 1500


async def measure(model: Path, delay_us: int | None, window_s: float) -> dict[str, object]:
    """Start a pair, hand some requests off, let it rest, and look at its processes."""
    engines = [VllmEngine(_settings(model, role, delay_us)) for role in (Role.PREFILL, Role.DECODE)]
    try:
        for engine in engines:
            await engine.start()
        handoff_s = [await _hand_off(engines[0], engines[1], seed) for seed in range(TRANSFERS)]
        await asyncio.sleep(SETTLE_S)
        cores = await _cores(engines, window_s)
        transfers = engines[1].load().transfers
    finally:
        for engine in engines:
            await engine.close()
    return {
        "cores": cores,
        "cores_total": round(sum(sum(one.values()) for one in cores.values()), 3),
        "decode_first_token_p50_s": round(statistics.median(handoff_s[1:]), 4),
        "transfer_mean_s": round(transfers.busy_s / max(1, transfers.pulls), 5),
        "moved_bytes": transfers.moved_bytes,
    }


def _settings(model: Path, role: Role, delay_us: int | None) -> VllmEngineSettings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return VllmEngineSettings(
        replica_id=f"{role}-0",
        pool=role.value,
        model_source=str(model),
        model_name="tiny",
        role=role,
        max_len_tokens=2048,
        kv_cache_bytes=64 << 20,
        enforce_eager=True,
        nixl=Nixl(host="127.0.0.1", port=port, progress_delay_us=delay_us),
        env={
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
    )


async def _hand_off(prefill: VllmEngine, decode: VllmEngine, seed: int) -> float:
    """Prefill on one engine, decode on the other; seconds from ticket to first token."""
    prompt = tuple((seed * 31 + n) % 8000 + 8 for n in range(PROMPT_TOKENS))
    leg = Leg(
        leg_id=f"p{seed}",
        request_id=str(seed),
        kind=LegKind.PREFILL,
        prompt_token_ids=prompt,
        max_tokens=1,
        payload=_payload(),
    )
    ticket = (await _finish(prefill, leg))[-1].ticket
    started = time.monotonic()
    await _finish(decode, evolve(leg, leg_id=f"d{seed}", kind=LegKind.DECODE, ticket=ticket))
    return time.monotonic() - started


async def _finish(engine: VllmEngine, leg: Leg) -> list[LegOutput]:
    failure = await engine.submit(leg)
    if failure is not None:
        raise SystemExit(f"leg {leg.leg_id}: {failure}")
    outputs: list[LegOutput] = []
    async with asyncio.timeout(60), aclosing(engine.steps()) as steps:
        async for step in steps:
            outputs += step
            if outputs[-1].finish is not None:
                return outputs
    raise SystemExit(f"leg {leg.leg_id}: the engine ended")


def _payload() -> bytes:
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=None,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return pack_frames(MsgpackEncoder().encode(request))


async def _cores(engines: list[VllmEngine], window_s: float) -> dict[str, dict[str, float]]:
    names = ("prefill", "decode")
    members = {
        n: [psutil.Process(p) for p in e.processes()] for n, e in zip(names, engines, strict=True)
    }
    before = {m.pid: sum(m.cpu_times()[:2]) for group in members.values() for m in group}
    await asyncio.sleep(window_s)
    return {
        name: {
            f"{m.cmdline()[0]} {n}": round((sum(m.cpu_times()[:2]) - before[m.pid]) / window_s, 3)
            for n, m in enumerate(group)
        }
        for name, group in members.items()
    }


def main() -> None:
    """Measure each delay in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays-us", default="none,1000,10000")
    parser.add_argument("--window-s", type=float, default=10.0)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    results = {}
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        for delay in options.delays_us.split(","):
            delay_us = None if delay == "none" else int(delay)
            results[delay] = asyncio.run(measure(model, delay_us, options.window_s))
    print(json.dumps({"window_s": options.window_s, "delay_us": results}))


if __name__ == "__main__":
    main()
