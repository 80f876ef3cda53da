"""Memory of a model on its devices, and the tokens of KV cache that remain.

    usable = utilization * visible memory
    KV cache = usable - weights - activations - runtime        on each device

The pipeline stage with room for the fewest tokens decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from baton.domain.errors import InsufficientMemory
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.model.layers import Attention, Layer, Part, StoredWeights
from baton.perf.model.shape import ModelShape
from baton.perf.model.weight_formats import uniform_weights

_VISIBLE_FRACTION = 0.988
"""Share of the memory that programs see; the driver keeps the rest. Source: PyTorch reports 79.2 of
80 GiB for an H100, 23.65 of 24 for an RTX 4090, 139.8 of 141 for an H200."""
_RUNTIME_BYTES = 551 * 2.0**20
"""Context, kernels, workspaces and captured graphs of an engine on one device. Source:
aiconfigurator, systems/h100_sxm.yaml, other_mem before its margin for safety."""
_COLLECTIVES_BYTES = {1: 0.0, 2: 342 * 2.0**20}
_MANY_COLLECTIVES_BYTES = 392 * 2.0**20
"""NCCL's buffers, by number of devices. Source: aiconfigurator, systems/h100_sxm.yaml."""
MIN_KV_TOKENS = 2048
"""An engine with fewer tokens can serve hardly any prompt."""
_MAX_DEVICES = 128
_UNBOUNDED_TOKENS = 2**62
_COPIED_PARTS = frozenset({Part.ROUTER, Part.INDEXER, Part.COMPRESSOR, Part.EXPERT_LATENT})
"""Each device has them whole."""
_SAMPLER_BYTES = 24
"""Per logit while sampling: logits in 32 bits, sorted logits, their 64-bit indices, probabilities,
cumulative sum. Source: the tensors alive in vLLM's `v1/sample/ops/topk_topp_sampler.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """A model over `tp` x `dp` x `pp` devices.

    Theory of operation. Tensor parallelism splits queries, outputs, feed-forwards and experts
    evenly. It splits keys and values among at most as many devices as KV heads; further devices
    hold copies. It does not split the compressed part of latent attention. Embeddings and output
    are split by vocabulary. Pipeline parallelism splits the layers into stages: the first has the
    embeddings, the last the output. Each of `dp` ranks has all but the routed experts, which all
    ranks share, and keys and values of its own requests.

    Source: Megatron-LM (1909.08053) §3; vLLM `distributed/utils.py` (get_pp_indices), the parallel
    layers of `model_executor/layers/linear.py`, and `layers/fused_moe/config.py`
    (flatten_tp_across_dp_and_pcp) and `expert_map_manager.py`.
    """

    shape: ModelShape
    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Ranks with requests of their own."""
    ep: bool = False
    """Whether a device has whole experts, instead of a slice of each."""

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1:
            raise ValueError(
                f"{self.shape.name}: got tp {self.tp}, pp {self.pp}, dp {self.dp}, expected 1 or"
                " more"
            )

    @property
    def devices(self) -> int:
        """Of all ranks and stages."""
        return self.tp * self.dp * self.pp

    @property
    def label(self) -> str:
        """As "tp 8, pp 1", with "dp 2" and "ep" where there are such."""
        ranks = f", dp {self.dp}" if self.dp > 1 else ""
        return f"tp {self.tp}, pp {self.pp}{ranks}{', ep' if self.ep else ''}"

    @property
    def is_valid(self) -> bool:
        """Whether engines accept it: whole query heads on each device, a layer in each stage.

        KV heads must divide the number of devices, or be divisible by it. Ranks share experts, an
        expert for each device at least.
        """
        if self.shape.heads % self.tp or self.pp > self.shape.layers:
            return False
        experts = self.shape.experts
        shares_experts = self.dp > 1 or self.ep
        if shares_experts and (experts is None or (self.ep and experts.count < self._sharers)):
            return False
        attentions = (layer.attention for layer in self.shape.layer_counts())
        return all(
            max(attention.kv_heads, self.tp) % min(attention.kv_heads, self.tp) == 0
            for attention in attentions
            if attention
        )

    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage; the remainder goes to the stages before the last."""
        base_layers, extra_layers = divmod(self.shape.layers, self.pp)
        return tuple(
            base_layers + (self.pp - 1 - extra_layers <= stage < self.pp - 1)
            for stage in range(self.pp)
        )

    # ------------------------------------------------------------------ weights

    def stage_weights_bytes(self, stage: int, weights: Dtype) -> float:
        """Per device of a stage: as published where that is mostly `weights`, else all in that.

        Embeddings, output and routers have at least 16 bits in the latter case.
        """
        stored = self.shape.stored
        if stored is None or stored.dtype is not weights:
            stored = uniform_weights(weights)
        layers_bytes = sum(
            count * self._layer_bytes(layer, stored)
            for layer, count in self._stage_counts(stage).items()
        )
        table_parameters = self.shape.output_parameters / self.tp
        is_last = stage == self.pp - 1
        has_embedding = stage == 0
        has_output = is_last and not (has_embedding and self.shape.tied_embeddings)
        table_bytes = has_embedding * stored.bytes_by_part[Part.EMBEDDING]
        table_bytes += has_output * stored.bytes_by_part[Part.OUTPUT]
        return layers_bytes + table_parameters * table_bytes

    def _stage_counts(self, stage: int) -> Mapping[Layer, int]:
        layers = self.stage_layers()
        first_layer = sum(layers[:stage])
        return self.shape.layer_counts(first_layer, first_layer + layers[stage])

    def _layer_bytes(self, layer: Layer, stored: StoredWeights) -> float:
        """Per device."""
        return sum(
            parameters * stored.bytes_by_part[part] * self._share(part, layer.attention)
            for part, parameters in self.shape.part_parameters(layer).items()
        )

    @property
    def _sharers(self) -> int:
        """Devices of a stage that share its routed experts."""
        return self.tp * self.dp

    def _share(self, part: Part, attention: Attention | None) -> float:
        """Of a part of a layer on one device."""
        if part in _COPIED_PARTS:
            return 1.0
        if part is Part.EXPERTS:
            experts = self.shape.experts
            if self.ep and experts is not None:
                return -(-experts.count // self._sharers) / experts.count
            return 1.0 / self._sharers
        if part is Part.KEY_VALUE and attention is not None:
            is_copied = attention.latent or attention.compression
            return 1.0 if is_copied else attention.kv_share(self.tp)
        return 1.0 / self.tp

    @property
    def attention_parameters(self) -> float:
        """Per layer and device, without an indexer."""
        shape = self.shape
        key_value = shape.kv_projection_parameters
        sharded = shape.attention_parameters - key_value
        return sharded / self.tp + key_value * self.kv_share

    # ------------------------------------------------------------------ KV cache

    @property
    def _kv_heads(self) -> int:
        return -(-self.shape.kv_heads // self.tp)

    @property
    def kv_share(self) -> float:
        """Share of a layer's keys and values on one device."""
        return self._kv_heads / self.shape.kv_heads

    def stage_token_bytes(self, stage: int, kv: Dtype) -> float:
        """Of one token on one device of a stage; windowed layers count in full."""
        return sum(
            count * layer.attention.kv_bytes(kv) * layer.attention.kv_share(self.tp)
            for layer, count in self._stage_counts(stage).items()
            if layer.attention
        )

    def stage_state_bytes(self, stage: int) -> float:
        """Of one request on one device of a stage, however long it is; states' heads are split."""
        return sum(
            count * layer.fixed_bytes / (self.tp if layer.state else 1)
            for layer, count in self._stage_counts(stage).items()
        )

    # ------------------------------------------------------------------ activations

    def activation_bytes(self, tokens: int) -> float:
        """Activations of a step of `tokens` of a rank at the peak, on one device, in 16 bits.

        They are the hidden state, the residual, and inputs and outputs of the widest part of a
        layer. A gated feed-forward has both halves and their product, attention has queries, keys
        and values. Experts have each token of all ranks, gathered, once per chosen expert; devices
        with whole experts do so, too.

        Source: vLLM 0.6.4 with Llama 3.1 8B held 92 and 98 kB per token of 20,000 and 29,000
        (vllm-project/vllm issue 10517); this function gives 102. Of experts: vLLM 0.32,
        `fused_moe/experts/triton_moe.py`, `workspace_shapes`.
        """
        shape = self.shape
        ffn_elements = (3 if shape.gated_ffn else 2) * shape.ffn_width / self.tp
        heads = shape.heads * shape.head_dim / self.tp
        attention_elements = 2 * heads + 2 * self._kv_heads * shape.head_dim
        expert_elements = 0.0
        if shape.experts:
            width = shape.experts.width / (1 if self.ep else self._sharers)
            chosen = shape.experts.active * self.dp
            expert_elements = chosen * (max(2 * width, shape.hidden) + width)
            ffn_elements = ffn_elements if shape.experts.dense_layers else 0.0
        peak_elements = max(ffn_elements, attention_elements, expert_elements)
        return tokens * (2 * shape.hidden + peak_elements) * DTYPE_BYTES[Dtype.BF16]

    def sampler_bytes(self, requests: int) -> float:
        """Memory to sample for `requests`; each device gathers all logits."""
        return float(requests * self.shape.vocab * _SAMPLER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Use of the memory, in bytes of the device with the least room for KV."""

    split: ModelSplit
    kv_dtype: Dtype
    usable_bytes: float
    weights_bytes: float
    activation_bytes: float
    runtime_bytes: float
    """Context, workspaces, graphs, buffers of collectives."""
    kv_bytes: float
    """Left for the KV cache."""
    kv_token_bytes: float
    """Of one token on that device."""
    state_bytes: float
    """Of one request's states on that device; 0 for most models."""
    kv_tokens: int
    """Of the whole replica, all its ranks, without states; windowed layers count in full."""

    def kv_blocks(self, block_size_tokens: int) -> int:
        """Whole blocks of this size in the replica."""
        return self.kv_tokens // block_size_tokens

    @property
    def rank_kv_tokens(self) -> int:
        """Of one rank, which has all of a request."""
        return self.kv_tokens // self.split.dp

    def has_room_for(self, tokens: int) -> bool:
        """Whether one request of `tokens` has room; windowed layers count in full."""
        return self.kv_bytes >= tokens * self.kv_token_bytes + self.state_bytes

    def concurrent_requests(self, context_tokens: int) -> float:
        """Requests of `context_tokens` that the KV cache holds; may be a fraction.

        Windowed layers keep only their window of each request, and each request has its states.
        """
        shape = self.split.shape
        tp = self.split.tp
        tokens_bytes = context_tokens * shape.device_token_bytes(self.kv_dtype, tp)
        request_factor = tokens_bytes / shape.request_bytes(context_tokens, self.kv_dtype, tp)
        return self.kv_tokens / context_tokens * request_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """A model, its devices, and the engine options that determine memory."""

    shape: ModelShape
    accelerator: Accelerator
    weights_dtype: Dtype = Dtype.BF16
    kv_dtype: Dtype = Dtype.BF16
    utilization: float = 0.9
    max_batched_tokens: int = 8192
    max_running_requests: int = 256
    min_kv_tokens: int = MIN_KV_TOKENS
    """With fewer, the model does not fit."""

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization: got {self.utilization}, expected above 0, at most 1")

    @property
    def weights_label(self) -> str:
        """Type of most weights, with the bits that they are published in."""
        stored = self.shape.stored
        is_published = stored is not None and stored.dtype is self.weights_dtype
        return stored.label if is_published and stored else str(self.weights_dtype)

    def fit(self, tp: int, pp: int, dp: int = 1, *, ep: bool = False) -> MemoryFit:
        """Use of the memory of a replica of `tp` x `dp` x `pp` devices.

        Raises:
            InsufficientMemory: memory is too small, or the model cannot be split like this.
        """
        split = ModelSplit(shape=self.shape, tp=tp, pp=pp, dp=dp, ep=ep)
        if not split.is_valid:
            raise self._cannot_split(split)
        memory_fit = self._at_tightest_stage(split)
        if not memory_fit.has_room_for(self.min_kv_tokens):
            raise self._does_not_fit(memory_fit)
        return memory_fit

    def fits(self, max_devices: int = 16, *, whole_nodes: bool = True) -> Iterator[MemoryFit]:
        """All splits that fit, fewest devices first.

        Tensor parallelism stays within a node. With `whole_nodes`, each pipeline stage is a node,
        as guides of engines advise. Without it, any number of stages is combined with any tensor
        parallelism.
        """
        for split in self._splits(max_devices, whole_nodes=whole_nodes):
            memory_fit = self._at_tightest_stage(split)
            if memory_fit.has_room_for(self.min_kv_tokens):
                yield memory_fit

    def _splits(self, max_devices: int, *, whole_nodes: bool) -> Iterator[ModelSplit]:
        """Fewest devices first; of equal numbers, widest tensor parallelism first."""
        widest = min(self.accelerator.devices_per_node, max_devices)
        tps = [tp for tp in range(1, widest + 1) if ModelSplit(shape=self.shape, tp=tp).is_valid]
        shapes = (
            (tp, pp)
            for tp in tps
            for pp in range(1, min(max_devices // tp, self.shape.layers) + 1)
            if pp == 1 or tp == tps[-1] or not whole_nodes
        )
        for tp, pp in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])):
            yield ModelSplit(shape=self.shape, tp=tp, pp=pp)

    def _at_tightest_stage(self, split: ModelSplit) -> MemoryFit:
        stages = (self._at_stage(split, stage) for stage in range(split.pp))
        return min(stages, key=lambda fit: fit.kv_tokens)

    def _at_stage(self, split: ModelSplit, stage: int) -> MemoryFit:
        usable_bytes = self.utilization * _VISIBLE_FRACTION * self.accelerator.memory_bytes
        weights_bytes = split.stage_weights_bytes(stage, self.weights_dtype)
        activation_bytes = split.activation_bytes(self.max_batched_tokens)
        if stage == split.pp - 1:
            # Sampling starts after the layers have freed their activations.
            sampler_bytes = split.sampler_bytes(self.max_running_requests)
            activation_bytes = max(activation_bytes, sampler_bytes)
        runtime_bytes = _RUNTIME_BYTES + _COLLECTIVES_BYTES.get(
            split.devices, _MANY_COLLECTIVES_BYTES
        )
        kv_bytes = usable_bytes - weights_bytes - activation_bytes - runtime_bytes
        token_bytes = split.stage_token_bytes(stage, self.kv_dtype)
        state_bytes = split.stage_state_bytes(stage)
        return MemoryFit(
            split=split,
            kv_dtype=self.kv_dtype,
            usable_bytes=usable_bytes,
            weights_bytes=weights_bytes,
            activation_bytes=activation_bytes,
            runtime_bytes=runtime_bytes,
            kv_bytes=kv_bytes,
            kv_token_bytes=token_bytes,
            state_bytes=state_bytes,
            kv_tokens=split.dp * _tokens(kv_bytes, token_bytes),
        )

    # ------------------------------------------------------------------ when it does not fit

    def _smallest_split(self) -> tuple[int, int] | None:
        """The split with the fewest devices, within a node or over whole nodes."""
        for fit in self.fits(_MAX_DEVICES):
            return fit.split.tp, fit.split.pp
        return None

    def _does_not_fit(self, memory_fit: MemoryFit) -> InsufficientMemory:
        term, needed_bytes = self._overflow(memory_fit)
        over_bytes = needed_bytes - memory_fit.usable_bytes
        split, device = memory_fit.split, self.accelerator
        return self._misfit_error(
            f"{self.shape.name} at {split.label} does not fit {device.name}:"
            f" with its {term} it needs {needed_bytes / 1e9:.2f} GB of each device, of which"
            f" {memory_fit.usable_bytes / 1e9:.2f} GB are usable: {over_bytes / 1e9:.2f} GB too"
            " much",
            term,
            over_bytes,
        )

    def _overflow(self, memory_fit: MemoryFit) -> tuple[str, float]:
        """The first term that exceeds the memory, and the sum up to it."""
        terms = (
            ("weights", memory_fit.weights_bytes),
            ("activations", memory_fit.activation_bytes),
            ("runtime", memory_fit.runtime_bytes),
            (
                f"KV cache of {self.min_kv_tokens} tokens",
                self.min_kv_tokens * memory_fit.kv_token_bytes + memory_fit.state_bytes,
            ),
        )
        needed_bytes = 0.0
        for term, term_bytes in terms:
            needed_bytes += term_bytes
            if needed_bytes > memory_fit.usable_bytes:
                return term, needed_bytes
        raise AssertionError(memory_fit)

    def _cannot_split(self, split: ModelSplit) -> InsufficientMemory:
        shape = self.shape
        if shape.experts is None and (split.dp > 1 or split.ep):
            reason, term = f"there are no experts to share at {split.label}", "experts"
        else:
            counts = f"{shape.heads} heads ({shape.kv_heads} of keys and values)"
            if split.ep and shape.experts is not None:
                counts += f", {shape.experts.count} experts"
            reason = f"{counts} and {shape.layers} layers cannot be split as {split.label}"
            term = "heads and layers"
        return self._misfit_error(f"{shape.name}: {reason}", term, 0.0)

    def _misfit_error(self, reason: str, term: str, over_bytes: float) -> InsufficientMemory:
        smallest = self._smallest_split()
        if smallest is None:
            remedy = (
                f"no split over up to {_MAX_DEVICES} {self.accelerator.name} does: take narrower"
                " weights or larger devices"
            )
        else:
            remedy = f"the smallest that fits is tp {smallest[0]}, pp {smallest[1]}"
        return InsufficientMemory(
            reason=reason,
            remedy=remedy,
            term=term,
            excess_bytes=over_bytes,
            min_parallelism=smallest,
        )


def _tokens(kv_bytes: float, token_bytes: float) -> int:
    """Whole tokens; a stage without keys and values has no bound."""
    return math.floor(kv_bytes / token_bytes) if token_bytes else _UNBOUNDED_TOKENS


def fit(  # noqa: PLR0913 - each is an option of the engine whose memory this is
    shape: ModelShape,
    accelerator: Accelerator,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    weights: Dtype = Dtype.BF16,
    kv: Dtype = Dtype.BF16,
    utilization: float = 0.9,
    max_batched_tokens: int = 8192,
    max_running_requests: int = 256,
) -> MemoryFit:
    """`MemoryModel.fit` in one call.

    Raises:
        InsufficientMemory: memory is too small, or the model cannot be split like this.
    """
    memory_model = MemoryModel(
        shape=shape,
        accelerator=accelerator,
        weights_dtype=weights,
        kv_dtype=kv,
        utilization=utilization,
        max_batched_tokens=max_batched_tokens,
        max_running_requests=max_running_requests,
    )
    return memory_model.fit(tp, pp, dp, ep=ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A split, and the replicas that hold the KV cache of all requests at once."""

    fit: MemoryFit
    replicas: int

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.fit.split.devices


def smallest_sizing(
    fits: Iterable[MemoryFit], *, requests: int, context_tokens: int
) -> Sizing | None:
    """The sizing with the fewest devices for `requests` of `context_tokens` each.

    None when no fit holds a single request, which cannot span replicas.
    """
    sizings = []
    for fit in fits:
        requests_per_replica = math.floor(fit.concurrent_requests(context_tokens))
        if requests_per_replica:
            sizings.append(Sizing(fit=fit, replicas=-(-requests // requests_per_replica)))
    return min(sizings, key=lambda sizing: sizing.devices, default=None)
