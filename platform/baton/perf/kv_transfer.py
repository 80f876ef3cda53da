"""How long keys and values take from the devices of one engine to those of another.

    seconds = setup + bytes of the busiest device / bandwidth of its link

Devices send side by side. What a device holds more than once for lack of KV heads, or because of
latent attention, every device of the target still has to get.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.hardware import Accelerator, Dtype
from baton.perf.model_shape import ModelShape
from baton.perf.sharding import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between one device of the source and one of the target."""

    bytes_per_s: float
    setup_s: float = 0.0
    """Until the first byte moves: the handshake, and posting the descriptors."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.setup_s < 0:
            raise ValueError(
                f"link: got {self.bytes_per_s} bytes/s, setup {self.setup_s} s,"
                " wanted above 0, at least 0"
            )

    def seconds(self, payload_bytes: float) -> float:
        """To move so many bytes."""
        return self.setup_s + payload_bytes / self.bytes_per_s


NETWORK_FRACTION = 0.87
"""Of the bandwidth of four interfaces, what a transfer engine reaches: 87 of 100 GB/s.
Source: Mooncake (FAST'25) §5.4, 4 x 200 Gbit/s; with 8 x 400 Gbit/s it is 190 of 400."""
SETUP_S = 0.5e-3
"""Source: order of magnitude of NIXL's post and notify over UCX, 0.2 to 1 ms."""


def link_between(source: Accelerator, target: Accelerator, *, same_node: bool) -> Link:
    """The link between devices of two pools; the slower end decides."""
    if same_node:
        peer_bytes_per_s = min(source.peer_bytes_per_s, target.peer_bytes_per_s)
        return Link(bytes_per_s=peer_bytes_per_s, setup_s=SETUP_S)
    network_bytes_per_s = min(source.network_bytes_per_s, target.network_bytes_per_s)
    return Link(bytes_per_s=NETWORK_FRACTION * network_bytes_per_s, setup_s=SETUP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """Between two engines of one model. Stages of a pipeline send and get side by side, too."""

    shape: ModelShape
    kv: Dtype
    source_tp: int = 1
    source_pp: int = 1
    target_tp: int = 1
    target_pp: int = 1

    def device_bytes(self, tokens: int) -> float:
        """What the busiest device sends or gets, of a prompt of so many tokens."""
        total_bytes = self.shape.kv_bytes(tokens, self.kv)
        ends = ((self.source_tp, self.source_pp), (self.target_tp, self.target_pp))
        return max(total_bytes * self._share(tp, pp) for tp, pp in ends)

    def seconds(self, tokens: int, link: Link) -> float:
        """From the first byte asked for to the last one there, on links of their own."""
        return link.seconds(self.device_bytes(tokens)) if tokens > 0 else 0.0

    def exposed_s(self, tokens: int, link: Link, *, prefill_s: float) -> float:
        """What is left of it behind a prefill that sends each layer as soon as it is computed.

        The first layer is there after 1/L of the prefill, and the last cannot be sent before the
        end: `max(0, T - P (L - 1) / L) + T / L`, never more than T.
        Source: Splitwise (2311.18677) §4.3, layer-wise transfer; the arithmetic of two stages.
        """
        transfer_s = self.seconds(tokens, link)
        layers = self.shape.layers
        behind_s = max(0.0, transfer_s - prefill_s * (layers - 1) / layers)
        return min(transfer_s, behind_s + transfer_s / layers)

    def _share(self, tp: int, pp: int) -> float:
        split = Split(shape=self.shape, tp=tp, pp=pp)
        return split.kv_share * max(split.stage_layers()) / self.shape.layers
