"""An engine's timing as five coefficients, linear in what one step computes.

    busy_s = decode_steps * decode_step_s + decode_requests * decode_request_s
           + context_tokens * context_token_s
           + prefill_steps * prefill_step_s + prefill_tokens * prefill_token_s

Sums over steps obey the same equation as one step does, which is why totals are enough to fit it.
What it leaves out: attention's part of a prefill grows with the square of the prompt, and ends up
in the coefficients of the mix of work that a pool has seen lately.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_BYTES_PER_S = 20e9
"""From the host's memory to a device, what PCIe 4.0 with 16 lanes leaves of its 31.5 GB/s once
packets and scattered blocks are paid for; an order of magnitude.
Source: PCI Express Base Specification 4.0 (16 GT/s a lane, 128b/130b)."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The five coefficients."""

    decode_step_s: float
    """Of a step that decodes for anyone: reading the weights, launching, sampling."""
    prefill_step_s: float
    """Of a step that prefills anything, on top of what decodes beside it cost."""
    prefill_token_s: float
    decode_request_s: float
    context_token_s: float
    """For each token that decoding requests attend to: reading its keys and values."""


PRIOR_COSTS = StepCosts(
    decode_step_s=8e-3,
    prefill_step_s=1e-3,
    prefill_token_s=5e-5,
    decode_request_s=5e-5,
    context_token_s=4e-8,
)
"""Round figures of the order of an 8-billion-parameter model in 16 bits on one data-centre GPU: 16
GB of weights at 2 TB/s take 8 ms, which a prefill, bound by arithmetic, hides; 2 FLOP for each
parameter and token at 0.4 of 800 TFLOP/s are 50 us a token; 128 KiB of keys and values a token (32
layers, 8 heads of 128, 2 x 2 bytes) at 3.3 TB/s are 40 ns. They only have to be of the right order
until an engine has been watched.
Source: roofline arithmetic on published data sheets (A100, H100) and Llama 3 8B's shape."""


def prefill_budget_tokens(
    max_batched_tokens: int, max_batched_tokens_while_decoding: int | None, running: int
) -> int:
    """How many prompt tokens one step computes beside so many decodes; at least one."""
    if running and max_batched_tokens_while_decoding is not None:
        return max(1, min(max_batched_tokens_while_decoding, max_batched_tokens) - running)
    return max(1, max_batched_tokens - running)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTiming:
    """`EngineTiming` by fitted coefficients; see the module for what they mean."""

    costs: StepCosts
    max_batched_tokens: int
    """How many tokens fit into one step, decodes included."""
    max_batched_tokens_while_decoding: int | None = None
    """How many, where anybody decodes; None: as many."""
    host_block_s: float
    """To bring one block from the host's memory."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Until `tokens` prompt tokens are computed, in chunks, beside `running` decodes.

        Every step decodes for all who run, and the chunk gets the room that they leave. How long
        the prompts are is all one to a linear model.
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
        """What one more request with so much context adds to each step."""
        return self.costs.decode_request_s + context_tokens * self.costs.context_token_s

    def host_load_s(self, blocks: int) -> float:
        """To bring blocks from the host's memory into the KV cache."""
        return max(0, blocks) * self.host_block_s
