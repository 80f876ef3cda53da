"""Matrix products and memory reads of one layer on one device of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The dense layers and the layers with experts, where the model has any."""
    experts = shape.experts
    attention = attention_matrices(shape, tp)
    attention_elements = 8 * shape.hidden + sum(matrix.outputs for matrix in attention)
    dense_layers = shape.layers if experts is None else experts.dense_layers
    kinds = []
    if dense_layers:
        ffn = _feed_forward(shape, shape.ffn_width, tp)
        elements = attention_elements + 2 * ffn[0].outputs
        kinds.append(
            LayerKernels(layers=dense_layers, matrices=(*attention, *ffn), elements=elements)
        )
    if experts is not None and shape.layers > dense_layers:
        shared = _feed_forward(shape, experts.shared * experts.width, tp) if experts.shared else ()
        routed = _feed_forward(shape, experts.width, tp)
        expert_elements = 2 * (experts.active + experts.shared) * routed[0].outputs
        kinds.append(
            LayerKernels(
                layers=shape.layers - dense_layers,
                matrices=(*attention, *shared, Matrix(inputs=shape.hidden, outputs=experts.count)),
                expert_matrices=routed,
                elements=attention_elements + expert_elements + 2 * experts.active * shape.hidden,
            )
        )
    return tuple(kinds)


def attention_matrices(shape: ModelShape, tp: int) -> tuple[Matrix, ...]:
    """Projections to queries, keys and values, and from the heads.

    Each device has a copy of KV heads that are fewer than devices, and of MLA's down-projections.
    """
    hidden, heads = shape.hidden, per_device(shape.heads, tp)
    latent = shape.latent
    if latent is None:
        kv_heads = per_device(shape.kv_heads, tp)
        return (
            Matrix(inputs=hidden, outputs=(heads + 2 * kv_heads) * shape.head_dim),
            Matrix(inputs=heads * shape.head_dim, outputs=hidden),
        )
    query = heads * (latent.nope_dim + latent.rope_dim)
    compressed = latent.kv_rank + latent.rope_dim + (latent.query_rank or 0)
    return (
        Matrix(inputs=hidden, outputs=compressed),
        Matrix(inputs=latent.query_rank or hidden, outputs=query),
        Matrix(inputs=latent.kv_rank, outputs=heads * (latent.nope_dim + latent.value_dim)),
        Matrix(inputs=heads * latent.value_dim, outputs=hidden),
    )


def per_device(count: int, tp: int) -> int:
    """A device's share of heads, at least one."""
    return max(1, -(-count // tp))


def _feed_forward(shape: ModelShape, width: int, tp: int) -> tuple[Matrix, Matrix]:
    device_width = max(1, -(-width // tp))
    return (
        Matrix(inputs=shape.hidden, outputs=(2 if shape.gated_ffn else 1) * device_width),
        Matrix(inputs=device_width, outputs=shape.hidden),
    )
