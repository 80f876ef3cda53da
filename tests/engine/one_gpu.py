"""A prefill and a decode engine that share one device: measured against what is predicted of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import LinkTotals, Role
from baton.engine.vllm.core.settings import VllmEngineSettings
from baton.perf.hardware.catalogue import accelerator
from baton.perf.model.known_models import shape_of
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from baton.policy.admission.slo_evaluation import tpot_s, ttft_s
from baton.policy.links.estimates import LinkState
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.engine.vllm_engines import engine_settings, peering_engine
from tests.engine.vllm_fleet import RealFleet
from tests.fakes.tiny_model import tiny_model

PREFILL, DECODE = "p0", "d0"
SHAPE = "meta-llama/Llama-3.1-8B"
_START_S = 600.0
_ROUNDS = 5
_STREAM_PROMPT_TOKENS, _STREAM_TOKENS = 512, 64
_FLIPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What it is measured on, and how far."""

    device: str
    """As `baton plan` names it; the CPU has no data sheet, so that nothing is predicted of it."""
    settings: VllmEngineSettings
    max_batched_tokens: int
    prompts_tokens: Sequence[int]
    streams: Sequence[int]

    @property
    def predicted(self) -> ModelledTiming | None:
        """What the performance model says of one of the two engines."""
        if self.device == "cpu":
            return None
        steps = Roofline(shape_of(SHAPE), accelerator(self.device))
        return ModelledTiming(
            steps=steps, max_batched_tokens=self.max_batched_tokens, host_block_s=0.0
        )


def on_cpu(folder: Path) -> Site:
    """The tiny model: shows that the measurement works, and nothing else."""
    return Site(
        device="cpu",
        settings=engine_settings(tiny_model(folder), Role.PREFILL),
        max_batched_tokens=2048,
        prompts_tokens=(64, 1024),
        streams=(1, 4),
    )


def on_gpu(folder: Path, device: str) -> Site:
    """An 8B model without weights of its own: dummies take as long to multiply."""
    plain = engine_settings(dummy_llama(folder), Role.PREFILL)
    settings = replace(
        plain,
        dtype="bfloat16",
        max_len_tokens=33_000,
        block_size_tokens=16,
        kv_cache_bytes=None,
        gpu_memory_utilization=0.42,
        max_batched_tokens=8192,
        max_running_requests=128,
        enforce_eager=False,
        prefix_caching=False,
        start_deadline_s=_START_S,
        env={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        extra={"load_format": "dummy"},
    )
    return Site(
        device=device,
        settings=settings,
        max_batched_tokens=8192,
        prompts_tokens=(128, 512, 2048, 8192, 32_768),
        streams=(1, 8, 32, 64, 128),
    )


def dummy_llama(folder: Path) -> Path:
    """The tiny model's tokenizer beside the configuration of an 8B Llama."""
    model = tiny_model(folder)
    said = json.loads((model / "config.json").read_text())
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "layer_types": None,
    }
    (model / "config.json").write_text(json.dumps(said | shape))
    return model


async def measured(site: Site) -> dict[str, object]:
    """All of it, on engines that are started and ended here."""
    coordinator = Coordinator(
        limits=CoordinatorLimits(transfer_s=60.0, stall_s=60.0, first_token_s=120.0),
        placer=PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS)),
        probing=ProbeOptions(interval_s=1.0, deadline_s=20.0, first_transfer_s=60.0),
    )
    real = RealFleet("one-gpu", {}, coordinator)
    try:
        for name, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            # One after the other: each measures how much of the device is free.
            nixl = engine_settings(Path(site.settings.model_source), role).nixl
            if nixl is not None and site.device != "cpu":
                nixl = replace(nixl, progress_delay_us=None)
            settings = replace(
                site.settings,
                replica_id=name,
                pool=role.value,
                role=role,
                nixl=nixl,
            )
            real.engines[name] = peering_engine(settings)
            await real.fleet.host(name, real.engines[name])
        links = coordinator.knowledge.links
        await real.until(lambda: links.state(PREFILL, DECODE) is LinkState.OK)
        await real.run(real.prompt(32), max_tokens=4)
        return {
            "device": site.device,
            "ttft": [await _ttft(real, site, tokens) for tokens in site.prompts_tokens],
            "tpot": [await _tpot(real, site, streams) for streams in site.streams],
            "transfer": await _transfer(real, max(site.prompts_tokens)),
            "role_flip_s": await _flips(real),
        }
    finally:
        await real.fleet.close()


async def _ttft(real: RealFleet, site: Site, tokens: int) -> dict[str, object]:
    """Of prompts of one length, one at a time, handed over before their first token counts."""
    records = [(await real.run(real.prompt(tokens), max_tokens=2))[1] for _ in range(_ROUNDS)]
    timing = site.predicted
    return {
        "prompt_tokens": tokens,
        "handed_off": sum(record.prefill_done_at_s is not None for record in records),
        "ttft_p50_s": median(took for one in records if (took := ttft_s(one)) is not None),
        "prefill_p50_s": median(
            one.prefill_done_at_s - one.arrived_at_s
            for one in records
            if one.prefill_done_at_s is not None
        ),
        "predicted_prefill_s": None if timing is None else timing.prefill_s(tokens),
    }


async def _tpot(real: RealFleet, site: Site, streams: int) -> dict[str, object]:
    """Of so many streams at once."""
    prompts = [real.prompt(_STREAM_PROMPT_TOKENS) for _ in range(streams)]
    sent = [real.send(prompt, max_tokens=_STREAM_TOKENS) for prompt in prompts]
    records = await real.ended(*sent)
    timing = site.predicted
    context_tokens = streams * (_STREAM_PROMPT_TOKENS + _STREAM_TOKENS // 2)
    return {
        "streams": streams,
        "tpot_p50_s": median(took for one in records if (took := tpot_s(one)) is not None),
        "predicted_step_s": None
        if timing is None
        else timing.step_s(running=streams, context_tokens=context_tokens),
    }


async def _transfer(real: RealFleet, tokens: int) -> dict[str, object]:
    """What the decode engine says of its pulls of the longest prompts."""
    before = _pulled(real.engines[DECODE].links())
    for _ in range(_ROUNDS):
        await real.run(real.prompt(tokens), max_tokens=2)
    after = _pulled(real.engines[DECODE].links())
    moved_bytes, busy_s = after.moved_bytes - before.moved_bytes, after.busy_s - before.busy_s
    return {
        "prompt_tokens": tokens,
        "pulls": after.pulls - before.pulls,
        "transport": after.transport,
        "moved_bytes": moved_bytes,
        "busy_s": busy_s,
        "bytes_per_s": moved_bytes / busy_s,
    }


def _pulled(totals: Sequence[LinkTotals]) -> LinkTotals:
    return next(one for one in totals if one.source_id == PREFILL)


async def _flips(real: RealFleet) -> list[float]:
    """From the word that a replica is meant for something else until the coordinator goes by it."""
    took: list[float] = []
    clock = asyncio.get_running_loop().time
    roles: Mapping[Role, Role] = {Role.DECODE: Role.MIXED, Role.MIXED: Role.DECODE}
    for _ in range(_FLIPS):
        role = roles[real.fleet.driver.fleet().replicas[DECODE].facts.role]
        began_s = clock()
        assert real.fleet.hosts[DECODE].set_role(role)
        await real.until(lambda wanted=role: _role(real) is wanted)  # type: ignore[misc]
        took.append(clock() - began_s)
    return took


def _role(real: RealFleet) -> Role:
    return real.fleet.driver.fleet().replicas[DECODE].facts.role
