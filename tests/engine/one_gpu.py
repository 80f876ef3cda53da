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
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from baton.policy.admission.slo_evaluation import tpot_s, ttft_s
from baton.policy.links.estimates import LinkState
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.engine.vllm_engines import engine_settings, engine_with_peers
from tests.engine.vllm_fleet import RealFleet
from tests.fakes.tiny_model import tiny_model

PREFILL, DECODE = "p0", "d0"
SHAPE = "meta-llama/Llama-3.1-8B"
_START_S = 600.0
_ROUNDS = 5
_STREAM_PROMPT_TOKENS, _STREAM_TOKENS = 512, 64
_FLIPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
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
        steps = Roofline(find_shape(SHAPE), find_accelerator(self.device))
        return ModelledTiming(
            steps=steps, max_batched_tokens=self.max_batched_tokens, host_block_s=0.0
        )


def on_cpu(folder: Path) -> Setup:
    """The tiny model: shows that the measurement works, and nothing else."""
    return Setup(
        device="cpu",
        settings=engine_settings(tiny_model(folder), Role.PREFILL),
        max_batched_tokens=2048,
        prompts_tokens=(64, 1024),
        streams=(1, 4),
    )


def on_gpu(folder: Path, device: str) -> Setup:
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
    return Setup(
        device=device,
        settings=settings,
        max_batched_tokens=8192,
        prompts_tokens=(128, 512, 2048, 8192, 32_768),
        streams=(1, 8, 32, 64, 128),
    )


def dummy_llama(folder: Path) -> Path:
    """The tiny model's tokenizer beside the configuration of an 8B Llama."""
    model = tiny_model(folder)
    model_config = json.loads((model / "config.json").read_text())
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
    (model / "config.json").write_text(json.dumps(model_config | shape))
    return model


async def measure(site: Setup) -> dict[str, object]:
    """All of it, on engines that are started and ended here."""
    coordinator = Coordinator(
        limits=CoordinatorLimits(
            transfer_deadline_s=60.0, stall_timeout_s=60.0, first_token_timeout_s=120.0
        ),
        placer=PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS)),
        probing=ProbeOptions(interval_s=1.0, deadline_s=20.0, first_transfer_s=60.0),
    )
    fleet = RealFleet("one-gpu", {}, coordinator)
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
            fleet.engines[name] = engine_with_peers(settings)
            await fleet.fleet.host(name, fleet.engines[name])
        links = coordinator.fleet_model.links
        await fleet.wait_until(lambda: links.state(PREFILL, DECODE) is LinkState.OK)
        await fleet.run(fleet.prompt(32), max_tokens=4)
        return {
            "device": site.device,
            "ttft": [await _ttft(fleet, site, tokens) for tokens in site.prompts_tokens],
            "tpot": [await _tpot(fleet, site, streams) for streams in site.streams],
            "transfer": await _transfer(fleet, max(site.prompts_tokens)),
            "role_flip_s": await _role_change_times_s(fleet),
        }
    finally:
        await fleet.fleet.close()


async def _ttft(fleet: RealFleet, site: Setup, tokens: int) -> dict[str, object]:
    """Of prompts of one length, one at a time, handed over before their first token counts."""
    records = [(await fleet.run(fleet.prompt(tokens), max_tokens=2))[1] for _ in range(_ROUNDS)]
    timing = site.predicted
    return {
        "prompt_tokens": tokens,
        "handed_off": sum(record.prefill_done_at_s is not None for record in records),
        "ttft_p50_s": median(took for record in records if (took := ttft_s(record)) is not None),
        "prefill_p50_s": median(
            record.prefill_done_at_s - record.arrived_at_s
            for record in records
            if record.prefill_done_at_s is not None
        ),
        "predicted_prefill_s": None if timing is None else timing.prefill_s(tokens),
    }


async def _tpot(fleet: RealFleet, site: Setup, streams: int) -> dict[str, object]:
    """Of so many streams at once."""
    prompts = [fleet.prompt(_STREAM_PROMPT_TOKENS) for _ in range(streams)]
    request_ids = [fleet.send(prompt, max_tokens=_STREAM_TOKENS) for prompt in prompts]
    records = await fleet.wait_ended(*request_ids)
    timing = site.predicted
    context_tokens = streams * (_STREAM_PROMPT_TOKENS + _STREAM_TOKENS // 2)
    return {
        "streams": streams,
        "tpot_p50_s": median(took for record in records if (took := tpot_s(record)) is not None),
        "predicted_step_s": None
        if timing is None
        else timing.step_s(running=streams, context_tokens=context_tokens),
    }


async def _transfer(fleet: RealFleet, tokens: int) -> dict[str, object]:
    """What the decode engine says of its pulls of the longest prompts."""
    before = _pulls_from_prefill(fleet.engines[DECODE].links())
    for _ in range(_ROUNDS):
        await fleet.run(fleet.prompt(tokens), max_tokens=2)
    after = _pulls_from_prefill(fleet.engines[DECODE].links())
    moved_bytes, busy_s = after.moved_bytes - before.moved_bytes, after.busy_s - before.busy_s
    return {
        "prompt_tokens": tokens,
        "pulls": after.pulls - before.pulls,
        "transport": after.transport,
        "moved_bytes": moved_bytes,
        "busy_s": busy_s,
        "bytes_per_s": moved_bytes / busy_s,
    }


def _pulls_from_prefill(totals: Sequence[LinkTotals]) -> LinkTotals:
    return next(total for total in totals if total.source_id == PREFILL)


async def _role_change_times_s(fleet: RealFleet) -> list[float]:
    """From the word that a replica is meant for something else until the coordinator goes by it."""
    durations_s: list[float] = []
    clock = asyncio.get_running_loop().time
    roles: Mapping[Role, Role] = {Role.DECODE: Role.MIXED, Role.MIXED: Role.DECODE}
    for _ in range(_FLIPS):
        role = roles[fleet.fleet.driver.fleet().replicas[DECODE].facts.role]
        started_s = clock()
        assert fleet.fleet.hosts[DECODE].set_role(role)
        await fleet.wait_until(lambda wanted=role: _role(fleet) is wanted)  # type: ignore[misc]
        durations_s.append(clock() - started_s)
    return durations_s


def _role(fleet: RealFleet) -> Role:
    return fleet.fleet.driver.fleet().replicas[DECODE].facts.role
