"""Features of vLLM that are switched on by configuration: what a handoff makes of them.

Each starts a prefill and a decode engine of its own. The handoff must give what one engine gives,
and every block must have been pulled; docs/features.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch

from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegKind
from baton.domain.value import evolve
from baton.engine.vllm.core.settings import Json
from tests.contracts.engine_contract import running_pair
from tests.engine.tiny_int8 import write_tiny_int8
from tests.engine.tiny_moe import write_tiny_moe
from tests.engine.vllm_engines import engine_settings, engine_with_checks, with_payload
from tests.fakes.scripted_engine import make_leg
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TOKENS = 24
MODEL = "{model}"
"""Stands for the folder of the model in an argument."""


@dataclass(frozen=True)
class Feature:
    """What engines are started with for it."""

    extra: Mapping[str, Json] = field(default_factory=dict)
    model: Callable[[Path], Path] = tiny_model
    max_batched_tokens: int | None = None
    max_batched_tokens_while_decoding: int | None = None
    dtype: str = "float32"
    """So that rounding has no say, where that is possible."""
    needs_avx512: bool = False

    def arguments(self, model: Path) -> dict[str, Json]:
        return {name: _filled(value, model) for name, value in self.extra.items()}


def _filled(value: Json, model: Path) -> Json:
    if isinstance(value, dict):
        return {name: _filled(other, model) for name, other in value.items()}
    return str(model) if value == MODEL else value


FEATURES = {
    "chunked prefill": Feature(max_batched_tokens=128),
    "two step budgets": Feature(max_batched_tokens=256, max_batched_tokens_while_decoding=128),
    "fp8 kv cache": Feature({"kv_cache_dtype": "fp8"}, needs_avx512=True),
    "ngram speculation": Feature(
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
            }
        }
    ),
    "draft model": Feature(
        {
            "speculative_config": {
                "method": "draft_model",
                "model": MODEL,
                "num_speculative_tokens": 3,
            }
        }
    ),
    "mixture of experts": Feature(model=write_tiny_moe),
    "int8 weights": Feature(model=write_tiny_int8, dtype="bfloat16"),
}


@pytest.fixture(params=FEATURES)
def feature(request: pytest.FixtureRequest) -> Feature:
    found = FEATURES[request.param]
    if found.needs_avx512 and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("vLLM keeps fp8 blocks on x86 only with AVX-512, which this machine has not")
    return found


async def test_a_handoff_gives_what_one_engine_gives(feature: Feature, tmp_path: Path) -> None:
    model = feature.model(tmp_path)
    prefill, decode = (
        engine_with_checks(
            replace(
                engine_settings(model, role),
                dtype=feature.dtype,
                max_batched_tokens=feature.max_batched_tokens,
                max_batched_tokens_while_decoding=feature.max_batched_tokens_while_decoding,
                max_running_requests=32,
                extra=feature.arguments(model),
            )
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    async with running_pair(prefill, decode) as pair:
        alone = await pair.decode.run(leg("alone"))
        await pair.prefill.run(evolve(leg("handed"), leg_id="p", kind=LegKind.PREFILL))
        ticket = pair.prefill.outputs("p")[-1].kv_handle
        handed = evolve(leg("handed"), kind=LegKind.DECODE, kv_handle=ticket)
        assert await pair.decode.run(handed) == alone
        size = pair.decode.facts.block_size_tokens
        moved = len(leg("handed").prompt_token_ids) // size * size
        assert (pair.decode.outputs("handed")[0].cached_tokens or 0) >= moved
        transfers = decode.load().transfers
        assert (transfers.pulls, transfers.failures) == (1, 0)


def leg(name: str) -> Leg:
    """Prompts repeat themselves, so that there is something to speculate on."""
    random = Random(1)
    part = tuple(random.randrange(400, 8000) for _ in range(50))
    return with_payload(make_leg(name, prompt=part * 6, max_tokens=TOKENS, cache_salt=name))
