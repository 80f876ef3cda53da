"""What a simulated engine is like: its speeds, its memory and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import baton
from baton.domain.fleet import ReplicaFacts, Role

FIRST_TOKEN_ID = 3
"""Ids 0, 1 and 2 are the special tokens of the byte-level vocabularies that we generate into."""
_LAST_PORT = 65_535
_POSITIVE = (
    "prefill_tokens_per_s",
    "transfer_bytes_per_s",
    "speed",
    "lease_s",
    "side_channel_deadline_s",
    "block_size_tokens",
    "kv_blocks",
    "kv_block_bytes",
    "host_bytes_per_s",
    "max_running_requests",
    "max_waiting_requests",
)
_NOT_NEGATIVE = (
    "prefill_step_s",
    "prefill_quadratic_s",
    "decode_step_s",
    "decode_request_s",
    "decode_kv_s",
    "decode_kv_quadratic_s",
    "step_overhead_s",
    "transfer_setup_s",
    "host_blocks",
    "adapter_slots",
    "adapter_load_s",
)


class OnTransferFailure(StrEnum):
    """What a decode leg does when its KV blocks cannot be fetched."""

    RECOMPUTE = "recompute"
    """It prefills the prompt itself."""
    FAIL = "fail"
    """It ends with an error."""


class SettingInvalid(ValueError):
    """An engine could not work with a setting; `expected` has others that bound it, as name=value.

    Arguments are positional because Ray pickles exceptions by `args`.
    """

    def __init__(self, name: str, got: object, expected: str) -> None:
        super().__init__(name, got, expected)
        self.name = name
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"simulated engine: {self.name} is {self.got}, expected {self.expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Speeds, memory and limits of a simulated engine.

    The defaults are round figures of the order of an 8-billion-parameter model on one data-centre
    GPU. They are not measurements, and nothing may be concluded from them about a real engine.

    Raises:
        SettingInvalid: an engine could not work with one of them.
    """

    prefill_tokens_per_s: float = 20_000.0
    prefill_step_s: float = 0.0
    """What a step that prefills anything costs besides."""
    prefill_quadratic_s: float = 0.0
    """Times the square of the prompt tokens that a step computes: attention among them."""
    decode_step_s: float = 0.008
    """Time of a step that decodes for anyone, whoever it is for: reading the weights."""
    decode_request_s: float = 0.000_05
    """What each decoding request adds to a step."""
    decode_kv_s: float = 0.0
    """Times the fraction of the KV blocks in use, added to a step that decodes."""
    decode_kv_quadratic_s: float = 0.0
    """Times the square of that fraction, taken off again; at most `decode_kv_s`."""
    step_overhead_s: float = 0.001
    transfer_bytes_per_s: float = 25e9
    """What an engine's network interface carries, in and out each."""
    transfer_setup_s: float = 0.002
    share_bandwidth: bool = True
    """Transfers at the same time share the interfaces that they have in common."""
    host_blocks: int = 0
    """Room in the host's memory for blocks that the KV cache has evicted; 0: they are lost."""
    host_bytes_per_s: float = 20e9
    """At which they come back."""
    adapter_slots: int = 0
    """LoRA adapters that are kept loaded at most; 0: none is served."""
    adapters_per_batch: int = 0
    """Different ones that may run at the same time."""
    adapter_load_s: float = 0.5
    """To load one; nothing is computed meanwhile."""
    speed: float = 1.0
    """Divides the duration of every step, load and transfer; leases and deadlines stay as
    they are."""

    max_len_tokens: int = 4096
    block_size_tokens: int = 16
    kv_blocks: int = 4096
    kv_block_bytes: int = 2 * 1024 * 1024
    kv_dtype: str = "bfloat16"
    max_running_requests: int = 256
    max_waiting_requests: int = 1024
    max_batched_tokens: int = 2048
    max_batched_tokens_while_decoding: int | None = None
    """The budget of a step that any stream waits for; None: that of every step."""

    lease_s: float = 30.0
    """How long a finished prefill leg's blocks are kept for a pull."""
    max_pulls: int | None = None
    """Legs that fetch blocks at a time; more wait for their turn. None: no limit."""
    on_transfer_failure: OnTransferFailure = OnTransferFailure.RECOMPUTE
    side_channel_host: str = "127.0.0.1"
    """Listened on, and written into tickets: other engines must be able to connect to it."""
    side_channel_port: int = 0
    """0 lets the system choose."""
    side_channel_deadline_s: float = 2.0
    """How long the other side may take to answer one message."""

    vocab_size: int = 97
    """Generated ids are in [3, vocab_size). A byte-level vocabulary starts with its special tokens
    and the 94 printable ASCII characters, so 97 keeps every token printable by itself."""
    eos_probability: float = 0.0
    """Chance that a token ends its sequence, drawn from the sequence itself like the token."""
    eos_token_id: int = 1

    invalid_token_id: int | None = None
    """A leg whose prompt has it is accepted, and then found to be wrong, as vLLM does with one
    whose grammar does not compile; None: there is no such token."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            self._require(name, "more than 0", is_valid=getattr(self, name) > 0)
        for name in _NOT_NEGATIVE:
            self._require(name, "at least 0", is_valid=getattr(self, name) >= 0)
        min_len_tokens = 2  # a prompt of one token and room for one more
        self._require(
            "max_len_tokens", "at least 2", is_valid=self.max_len_tokens >= min_len_tokens
        )
        self._require(
            "kv_blocks",
            f"room for one request of max_len_tokens={self.max_len_tokens}",
            is_valid=self.kv_blocks * self.block_size_tokens >= self.max_len_tokens,
        )
        self._require(
            "max_batched_tokens",
            f"at least max_running_requests={self.max_running_requests}, a token for each",
            is_valid=self.max_batched_tokens >= self.max_running_requests,
        )
        self._require(
            "max_batched_tokens_while_decoding",
            f"from max_running_requests={self.max_running_requests} to"
            f" max_batched_tokens={self.max_batched_tokens}",
            is_valid=self.max_batched_tokens_while_decoding is None
            or self.max_running_requests
            <= self.max_batched_tokens_while_decoding
            <= self.max_batched_tokens,
        )
        self._require(
            "vocab_size", f"more than {FIRST_TOKEN_ID}", is_valid=self.vocab_size > FIRST_TOKEN_ID
        )
        self._require(
            "decode_kv_quadratic_s",
            f"at most decode_kv_s={self.decode_kv_s}",
            is_valid=self.decode_kv_quadratic_s <= self.decode_kv_s,
        )
        self._require(
            "adapters_per_batch",
            f"from {min(1, self.adapter_slots)} to adapter_slots={self.adapter_slots}",
            is_valid=min(1, self.adapter_slots) <= self.adapters_per_batch <= self.adapter_slots,
        )
        self._require(
            "max_pulls",
            "at least 1, or none",
            is_valid=self.max_pulls is None or self.max_pulls >= 1,
        )
        self._require("eos_probability", "from 0 to 1", is_valid=0 <= self.eos_probability <= 1)
        self._require(
            "side_channel_port",
            f"from 0 to {_LAST_PORT}",
            is_valid=0 <= self.side_channel_port <= _LAST_PORT,
        )

    def step_s(
        self, *, prefill_tokens: int, decode_requests: int, kv_used_fraction: float = 0.0
    ) -> float:
        """How long a step takes that computes so many prompt tokens and decodes for so many."""
        took_s = self.step_overhead_s
        if prefill_tokens:
            took_s += self.prefill_step_s
            took_s += prefill_tokens / self.prefill_tokens_per_s
            took_s += prefill_tokens * prefill_tokens * self.prefill_quadratic_s
        if decode_requests:
            took_s += self.decode_step_s + decode_requests * self.decode_request_s
            took_s += kv_used_fraction * (
                self.decode_kv_s - kv_used_fraction * self.decode_kv_quadratic_s
            )
        return took_s / self.speed

    def transfer_s(self, moved_bytes: int) -> float:
        """How long a transfer of these bytes takes that shares with no other."""
        return self.transfer_setup_s / self.speed + moved_bytes / self.wire_bytes_per_s

    @property
    def wire_bytes_per_s(self) -> float:
        """What a network interface carries in the time that the engine runs in."""
        return self.transfer_bytes_per_s * self.speed

    def host_load_s(self, blocks: int) -> float:
        """How long blocks take from the host's memory into the KV cache."""
        return blocks * self.kv_block_bytes / (self.host_bytes_per_s * self.speed)

    def layout(self, model: str) -> str:
        """What two engines must have in common to exchange blocks."""
        return f"sim/{model}/{self.kv_dtype}/{self.block_size_tokens}x{self.kv_block_bytes}"

    def _require(self, name: str, expected: str, *, is_valid: bool) -> None:
        if not is_valid:
            raise SettingInvalid(name, getattr(self, name), expected)


def replica_facts(
    settings: SimSettings, *, replica_id: str, pool: str, role: Role, model: str, side_channel: str
) -> ReplicaFacts:
    """The facts of a replica with this engine."""
    return ReplicaFacts(
        replica_id=replica_id,
        pool=pool,
        role=role,
        model=model,
        engine="sim",
        engine_version=baton.__version__,
        block_size_tokens=settings.block_size_tokens,
        kv_blocks=settings.kv_blocks,
        kv_block_bytes=settings.kv_block_bytes,
        max_len_tokens=settings.max_len_tokens,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_batched_tokens,
        max_batched_tokens_while_decoding=settings.max_batched_tokens_while_decoding,
        layout=settings.layout(model),
        side_channel=side_channel,
        cache_events=True,
        supports_prefix_fetch=True,
        host_blocks=settings.host_blocks,
        adapter_slots=settings.adapter_slots,
        adapters_per_batch=settings.adapters_per_batch,
    )
