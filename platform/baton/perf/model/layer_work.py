"""Matrix products and memory reads of one layer on one device of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.perf.model.layers import Attention, Layer, Part
from baton.perf.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Weights of one product, as one device stores them."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """The products of one kind of layer on one device."""

    layers: int
    matrices: tuple[Matrix, ...]
    expert_matrices: tuple[Matrix, ...] = ()
    """Of one routed expert."""
    elements: int
    """Numbers that the small kernels read and write per token."""


def layer_kinds(shape: ModelShape, tp: int) -> tuple[LayerKernels, ...]:
    """Kinds of layers by their products, dense layers first where the model has any."""
    kinds: dict[LayerKernels, int] = {}
    for layer, count in shape.layer_counts().items():
        kernels = _kernels(shape, layer, tp)
        kinds[kernels] = kinds.get(kernels, 0) + count
    return tuple(replace(kernels, layers=count) for kernels, count in kinds.items())


def _kernels(shape: ModelShape, layer: Layer, tp: int) -> LayerKernels:
    """Of one layer."""
    mixer: list[Matrix] = []
    if layer.attention is not None:
        mixer += attention_matrices(layer.attention, shape.hidden, tp)
    if layer.state is not None:
        mixer += _state_matrices(layer, tp)
    elements = 8 * shape.hidden + sum(matrix.outputs for matrix in mixer)
    matrices = list(mixer)
    routed: tuple[Matrix, ...] = ()
    if layer.ffn_width:
        ffn = _feed_forward(shape, shape.hidden, layer.ffn_width, tp)
        matrices += ffn
        elements += 2 * ffn[0].outputs
    if layer.token_input is not None:
        matrices += [
            Matrix(inputs=module.inputs, outputs=module.outputs)
            for module in layer.token_input.modules(shape.hidden)
            if module.part is not Part.EMBEDDING
        ]
    if (experts := layer.experts) is not None:
        if shared_width := experts.all_shared_width:
            matrices += _feed_forward(shape, shape.hidden, shared_width, tp)
        seen = experts.latent or shape.hidden
        if experts.latent is not None:
            matrices += _latent_projections(shape.hidden, seen)
        matrices.append(Matrix(inputs=shape.hidden, outputs=experts.count))
        routed = _feed_forward(shape, seen, experts.width, tp)
        used = experts.active + experts.all_shared_width / experts.width
        elements += round(2 * used * routed[0].outputs) + 2 * experts.active * seen
    return LayerKernels(
        layers=1, matrices=tuple(matrices), expert_matrices=tuple(routed), elements=elements
    )


def attention_matrices(attention: Attention, hidden: int, tp: int) -> tuple[Matrix, ...]:
    """Projections to queries, keys and values, and from the heads.

    Each device has a copy of KV heads that are fewer than devices, and of MLA's down-projections.
    """
    heads, latent = per_device(attention.heads, tp), attention.latent
    if attention.compression is not None:
        return tuple(
            Matrix(
                inputs=per_device(module.inputs, tp)
                if module.name.endswith("o_b_proj")
                else module.inputs,
                outputs=per_device(module.outputs, tp)
                if module.name.endswith(("q_b_proj", "o_a_proj"))
                else module.outputs,
            )
            for module in attention.modules(hidden)
        )
    if latent is None:
        kv_heads = per_device(attention.kv_heads, tp)
        values = attention.value_dim or attention.head_dim
        outputs = (2 if attention.gated else 1) * heads * attention.head_dim
        outputs += 0 if attention.shares_kv else kv_heads * attention.head_dim
        outputs += 0 if attention.keys_are_values or attention.shares_kv else kv_heads * values
        products: tuple[Matrix, ...] = (
            Matrix(inputs=hidden, outputs=outputs),
            Matrix(inputs=heads * values, outputs=hidden),
        )
    else:
        query = heads * (latent.nope_dim + latent.rope_dim)
        compressed = latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)
        products = (
            Matrix(inputs=hidden, outputs=compressed),
            Matrix(inputs=latent.query_rank or hidden, outputs=query),
            Matrix(inputs=latent.kv_rank, outputs=heads * (latent.nope_dim + latent.value_dim)),
            Matrix(inputs=heads * latent.value_dim, outputs=hidden),
        )
    copied = (
        Matrix(inputs=module.inputs, outputs=module.outputs)
        for module in attention.modules(hidden)
        if module.part is Part.INDEXER
    )
    return (*products, *copied)


def _state_matrices(layer: Layer, tp: int) -> list[Matrix]:
    """Those from the hidden state are split by outputs, those to it by inputs."""
    matrices = layer.state.matrices if layer.state else ()
    return [
        Matrix(inputs=per_device(module.inputs, tp), outputs=module.outputs)
        if module.name.endswith(("out_proj", "o_proj"))
        else Matrix(inputs=module.inputs, outputs=per_device(module.outputs, tp))
        for module in matrices
    ]


def per_device(count: int, tp: int) -> int:
    """A device's share of heads, at least one."""
    return max(1, -(-count // tp))


def _latent_projections(hidden: int, latent: int) -> tuple[Matrix, Matrix]:
    """To and from the narrower input of routed experts; each device has them."""
    return Matrix(inputs=hidden, outputs=latent), Matrix(inputs=latent, outputs=hidden)


def _feed_forward(shape: ModelShape, inputs: int, width: int, tp: int) -> tuple[Matrix, Matrix]:
    device_width = max(1, -(-width // tp))
    return (
        Matrix(inputs=inputs, outputs=(2 if shape.gated_ffn else 1) * device_width),
        Matrix(inputs=device_width, outputs=inputs),
    )
