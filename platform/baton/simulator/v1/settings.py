"""Timing, memory and limits of a counted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.perf.step_timing import StepTiming


class Scheduling(StrEnum):
    """How prompts and decodes share steps."""

    CHUNKED = "chunked"
    """vLLM V1: running requests first, prompts in chunks, both in one step."""
    PREFILL_FIRST = "prefill_first"
    """vLLM before V1, DistServe: whole prompts in steps of their own, before any decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V1Settings:
    """One engine; defaults are vLLM's where it has any."""

    timing: StepTiming
    kv_blocks: int
    kv_block_bytes: int
    block_size_tokens: int = 16
    request_blocks: int = 0
    """Blocks of a request beside those of its tokens: the states of a hybrid model."""
    max_len_tokens: int = 131_072
    max_running_requests: int = 256
    """vLLM's max_num_seqs."""
    max_batched_tokens: int = 8192
    """vLLM's max_num_batched_tokens: the token budget of a step."""
    max_batched_tokens_while_decoding: int | None = None
    """The budget of a step with streaming legs; None for no difference."""
    long_prefill_tokens: int | None = None
    """vLLM's long_prefill_token_threshold: the longest chunk of one prompt; None for no limit."""
    ranks: int = 1
    """Data-parallel ranks that share the limits above evenly; a prompt is one rank's."""
    prefix_caching: bool = True
    scheduling: Scheduling = Scheduling.CHUNKED
    pipeline_stages: int = 1
    """Batches that may be under way at once. `timing` is the time through all stages; the next
    batch may begin after 1/stages of it."""
    lease_s: float = 30.0
    transfer_bytes_per_s: float = 50e9
    """Bandwidth of all this engine's network interfaces together, in and out each."""
    transfer_setup_s: float = 0.001
    max_waiting_requests: int = 1_000_000
    max_pulls: int = 8
    """Concurrent pulls into this engine; more wait."""
    first_token_s: float = 0.0
    """From the engine to the client, outside all steps; later tokens come as much later."""
    layout: str = "v1"
    """Engines exchange blocks only within the same layout."""
    weights_load_s: float = 60.0
    """Time from the request for a new replica until it serves."""

    def __post_init__(self) -> None:
        positive_fields = (
            "kv_blocks kv_block_bytes block_size_tokens max_running_requests max_batched_tokens"
            " ranks pipeline_stages lease_s transfer_bytes_per_s max_waiting_requests max_pulls"
        )
        for name in positive_fields.split():
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"simulated engine: {name} is {getattr(self, name)}, expected more than 0"
                )
        self._check_max_batched_tokens_while_decoding()
        min_len_tokens = 2  # a prompt of one token and room for one more
        if self.max_len_tokens < min_len_tokens:
            raise ValueError(
                f"simulated engine: max_len_tokens is {self.max_len_tokens}, expected at least 2"
            )

    def _check_max_batched_tokens_while_decoding(self) -> None:
        tokens, min_tokens = self.max_batched_tokens_while_decoding, self.max_running_requests
        if tokens is None:
            return
        # Below max_running_requests the last streams would starve.
        if not min_tokens <= tokens <= self.max_batched_tokens:
            raise ValueError(
                f"simulated engine: max_batched_tokens_while_decoding is {tokens}, expected from"
                f" max_running_requests={min_tokens} to"
                f" max_batched_tokens={self.max_batched_tokens}"
            )
        if self.scheduling is Scheduling.PREFILL_FIRST:  # whole prompts keep to no such budget
            raise ValueError(
                f"simulated engine: max_batched_tokens_while_decoding is {tokens}, expected none"
                f" with scheduling '{self.scheduling}', which cuts no prompt: leave one of them out"
            )

    @property
    def prompt_chunk_tokens(self) -> int:
        """The longest chunk of one prompt."""
        rank_tokens = self.max_batched_tokens // self.ranks
        return min(rank_tokens, self.long_prefill_tokens or rank_tokens)

    def for_ranks(self, ranks: int) -> V1Settings:
        """`ranks` such engines that step together, each with requests of its own, as one.

        Requests are taken to be spread evenly, as vLLM's load balancer aims at. A request stays in
        one rank: its context has room there, and its chunks keep to the rank's budget.
        """
        if ranks == 1:
            return self
        streaming_tokens = self.max_batched_tokens_while_decoding
        return replace(
            self,
            kv_blocks=self.kv_blocks * ranks,
            max_len_tokens=min(self.max_len_tokens, self.kv_blocks * self.block_size_tokens),
            max_running_requests=self.max_running_requests * ranks,
            max_batched_tokens=self.max_batched_tokens * ranks,
            max_batched_tokens_while_decoding=None
            if streaming_tokens is None
            else streaming_tokens * ranks,
            ranks=ranks,
            transfer_bytes_per_s=self.transfer_bytes_per_s * ranks,
            max_pulls=self.max_pulls * ranks,
        )

    def token_budget(self, has_streaming_run: Callable[[], bool]) -> int:
        """Tokens of the next step; calls `has_streaming_run` only where it matters."""
        if self.max_batched_tokens_while_decoding is not None and has_streaming_run():
            return self.max_batched_tokens_while_decoding
        return self.max_batched_tokens
