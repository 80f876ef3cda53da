"""What one device holds of a model that is split: weights, keys and values, activations.

Theory of operation. Tensor parallelism splits the matrices of each layer: queries, outputs,
feed-forwards and experts evenly, keys and values among as many devices as there are KV heads
(beyond that devices hold the same), and what latent attention compresses into not at all.
Embeddings and the output are split by vocabulary. Pipeline parallelism splits the layers into
stages; the embeddings are with the first, the output with the last.

Source: Megatron-LM (1909.08053) §3; vLLM `distributed/utils.py` (get_pp_indices) and the parallel
layers of `model_executor/layers/linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.perf.model.shape import ModelShape

STORED_BYTES: dict[Dtype, float] = {
    **DTYPE_BYTES,
    Dtype.INT4: 0.5 + (2 + 0.5) / 128,
    Dtype.FP4: 0.5 + 1 / 16,
}
"""Of a quantized weight with its share of scales. Source: AWQ (2306.00978), groups of 128 with a
scale of 16 and a zero point of 4 bits; NVFP4, groups of 16 with a scale of 8 bits (MXFP4: 32)."""

_SAMPLER_BYTES = 24
"""Of each logit while sampling: logits in 32 bits, sorted ones, their 64-bit indices, probabilities
and their cumulative sum. Source: the tensors alive in vLLM's `v1/sample/ops/topk_topp_sampler.py`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """A model over `tp` x `pp` devices."""

    shape: ModelShape
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError(f"{self.shape.name}: got tp {self.tp}, pp {self.pp}, wanted 1 or more")

    @property
    def is_valid(self) -> bool:
        """Whether engines accept it: whole query heads on each device, a layer in each stage.

        KV heads have to divide, or be divided by, the devices they are spread over.
        """
        heads = self.shape.heads % self.tp == 0
        smaller, larger = sorted((self.shape.kv_heads, self.tp))
        return heads and larger % smaller == 0 and self.pp <= self.shape.layers

    def stage_layers(self) -> tuple[int, ...]:
        """How many layers each stage has: what is left over goes to those before the last."""
        base_layers, extra_layers = divmod(self.shape.layers, self.pp)
        return tuple(
            base_layers + (self.pp - 1 - extra_layers <= stage < self.pp - 1)
            for stage in range(self.pp)
        )

    # ------------------------------------------------------------------ weights

    def stage_weights_bytes(self, stage: int, weights: Dtype) -> float:
        """Of one device of a stage. Embeddings and output stay in 16 bits when others are fewer."""
        layers = self.stage_layers()
        first_layer = sum(layers[:stage])
        parameters = self._layers_parameters(first_layer, first_layer + layers[stage])
        table_parameters = self.shape.output_parameters / self.tp
        table_count = (stage == 0) + (stage == self.pp - 1)
        if self.pp == 1 and self.shape.tied_embeddings:
            table_count = 1
        table_dtype_bytes = max(STORED_BYTES[weights], DTYPE_BYTES[Dtype.BF16])
        return (
            parameters * STORED_BYTES[weights] + table_count * table_parameters * table_dtype_bytes
        )

    def _layers_parameters(self, first: int, end: int) -> float:
        """Of one device, for a range of layers; those without experts are taken to come first."""
        shape = self.shape
        dense_layers = shape.layers - shape.expert_layers
        dense = max(0, min(end, dense_layers) - first)
        expert_layers = end - first - dense
        return (
            (end - first) * self.attention_parameters
            + dense * shape.ffn_parameters / self.tp
            + expert_layers * self._expert_layer_parameters
        )

    @property
    def attention_parameters(self) -> float:
        """Of one layer on one device."""
        shape = self.shape
        key_value = shape.kv_projection_parameters
        sharded = shape.attention_parameters - key_value
        return sharded / self.tp + key_value * self._kv_heads / shape.kv_heads

    @property
    def _expert_layer_parameters(self) -> float:
        """Experts are split like any feed-forward; the router is on every device."""
        experts = self.shape.experts
        if experts is None:
            return 0.0
        expert_parameters = (experts.count + experts.shared) * self.shape.expert_parameters
        return expert_parameters / self.tp + self.shape.hidden * experts.count

    # ------------------------------------------------------------------ KV cache

    @property
    def _kv_heads(self) -> int:
        return -(-self.shape.kv_heads // self.tp)

    @property
    def kv_share(self) -> float:
        """The part of a layer's keys and values that one device holds."""
        return self._kv_heads / self.shape.kv_heads

    def stage_token_bytes(self, stage: int, kv: Dtype) -> float:
        """Of one token on one device of a stage, each of its layers counted in full."""
        return self.stage_layers()[stage] * self.shape.kv_layer_bytes(kv) * self.kv_share

    # ------------------------------------------------------------------ activations

    def activation_bytes(self, tokens: int) -> float:
        """What a step of so many tokens needs besides, at its widest place, on one device.

        The hidden state and the residual, and at the widest place of a layer what goes in and what
        comes out: of a gated feed-forward both halves and their product, of attention queries, keys
        and values, of experts the tokens once for each that they chose. In 16 bits.
        Source: vLLM 0.6.4 with Llama 3.1 8B held 92 and 98 kB per token of 20,000 and 29,000
        (vllm-project/vllm issue 10517); this says 102.
        """
        shape = self.shape
        ffn_elements = (3 if shape.gated_ffn else 2) * shape.ffn_width / self.tp
        heads = shape.heads * shape.head_dim / self.tp
        attention_elements = 2 * heads + 2 * self._kv_heads * shape.head_dim
        expert_elements = 0.0
        if shape.experts:
            width = shape.experts.width / self.tp
            expert_elements = shape.experts.active * (max(2 * width, shape.hidden) + width)
            ffn_elements = ffn_elements if shape.experts.dense_layers else 0.0
        peak_elements = max(ffn_elements, attention_elements, expert_elements)
        return tokens * (2 * shape.hidden + peak_elements) * DTYPE_BYTES[Dtype.BF16]

    def sampler_bytes(self, requests: int) -> float:
        """What sampling for so many requests needs; every device gathers all logits."""
        return float(requests * self.shape.vocab * _SAMPLER_BYTES)
