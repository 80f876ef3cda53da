"""The step times of a configuration's simulated engine, as the counted engine asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.step_timing import StepBatch
from baton.simulator.engine.settings import SimSettings


@dataclass(frozen=True, slots=True)
class SimStepTiming:
    """A `StepTiming`: linear in tokens and requests, square in prompt tokens, as configured."""

    settings: SimSettings

    def step_s(self, batch: StepBatch) -> float:
        """From the batch being chosen to its tokens being there."""
        settings = self.settings
        capacity_tokens = settings.kv_blocks * settings.block_size_tokens
        return settings.step_s(
            prefill_tokens=batch.prefill_tokens,
            decode_requests=batch.decode_requests,
            kv_used_fraction=min(1.0, batch.decode_context_tokens / capacity_tokens),
        )
