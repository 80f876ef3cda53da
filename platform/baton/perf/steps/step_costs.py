"""An engine's timing as five coefficients, linear in the work of a step.

    busy_s = decode_steps * decode_step_s + decode_requests * decode_request_s
           + context_tokens * context_token_s
           + prefill_steps * prefill_step_s + prefill_tokens * prefill_token_s

Sums over steps obey the same equation, so totals are enough to fit it. Prefill attention grows with
the square of the prompt; the model puts it into the coefficients of a pool's recent mix of work.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_BYTES_PER_S = 20e9
"""From host memory to a device: PCIe 4.0 x16 (31.5 GB/s) less packets and scattered blocks; an
order of magnitude. Source: PCI Express Base Specification 4.0 (16 GT/s a lane, 128b/130b)."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The five coefficients."""

    decode_step_s: float
    """Of a step with decodes: reading the weights, launching, sampling."""
    prefill_step_s: float
    """Of a step with prefill, in addition to its decodes."""
    prefill_token_s: float
    decode_request_s: float
    context_token_s: float
    """Per token that decoding requests attend to: reading its keys and values."""


PRIOR_COSTS = StepCosts(
    decode_step_s=8e-3,
    prefill_step_s=1e-3,
    prefill_token_s=5e-5,
    decode_request_s=5e-5,
    context_token_s=4e-8,
)
"""Orders of magnitude for an 8-billion-parameter model in 16 bits on one data-centre GPU.

- `decode_step_s`: 16 GB of weights at 2 TB/s take 8 ms. Prefill, bound by arithmetic, hides it.
- `prefill_token_s`: 2 FLOP per parameter and token at 0.4 of 800 TFLOP/s are 50 us.
- `context_token_s`: 128 KiB of keys and values (32 layers, 8 heads of 128) at 3.3 TB/s are 40 ns.

Source: data sheets of A100 and H100, and Llama 3 8B's shape."""


def prefill_budget_tokens(
    max_batched_tokens: int, max_batched_tokens_while_decoding: int | None, running: int
) -> int:
    """Prompt tokens that one step computes beside `running` decodes; at least one."""
    if running and max_batched_tokens_while_decoding is not None:
        return max(1, min(max_batched_tokens_while_decoding, max_batched_tokens) - running)
    return max(1, max_batched_tokens - running)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTiming:
    """`EngineTiming` by fitted coefficients."""

    costs: StepCosts
    max_batched_tokens: int
    """Tokens of one step, decodes included."""
    max_batched_tokens_while_decoding: int | None = None
    """The same for steps with decodes; None: no lower limit."""
    host_block_s: float
    """Time to load one block from host memory."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Time to compute `tokens` prompt tokens, in chunks, beside `running` decodes.

        Each step decodes for all running requests; the chunk gets the remaining budget. A linear
        model ignores the prompts' lengths.
        """
        del length_tokens
        if tokens <= 0:
            return 0.0
        chunk_budget_tokens = prefill_budget_tokens(
            self.max_batched_tokens, self.max_batched_tokens_while_decoding, running
        )
        steps = -(-tokens // chunk_budget_tokens)
        step_s = self.costs.prefill_step_s
        if running:
            step_s += self.step_s(running=running, context_tokens=context_tokens)
        return steps * step_s + tokens * self.costs.prefill_token_s

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """One step that decodes for `running` requests and prefills nothing."""
        costs = self.costs
        requests_s = running * costs.decode_request_s
        return costs.decode_step_s + requests_s + context_tokens * costs.context_token_s

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """Time that another request with `context_tokens` adds to each step."""
        return self.costs.decode_request_s + context_tokens * self.costs.context_token_s

    def host_load_s(self, blocks: int) -> float:
        """Time to load blocks from host memory into the KV cache."""
        return max(0, blocks) * self.host_block_s
